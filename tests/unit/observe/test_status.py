"""RUN_DIR/status.json: what a run says of itself to the script that started it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.errors import RunError
from oblr_megatron.observe.status import STATUS_FILE, Status, recorded


def run(directory: Path, rank: int = 0) -> Any:
    """What `recorded` looks at."""
    config = SimpleNamespace(run_dir=directory, num_steps=8)
    return SimpleNamespace(parallel=SimpleNamespace(rank=rank), config=config, start=3, done=0, stopped_by=None)


def stands(directory: Path) -> tuple[str, int, int, str]:
    found = Status(**json.loads((directory / STATUS_FILE).read_text()))
    assert found.unix_time > 1e9
    return found.state, found.step, found.num_steps, found.reason


def test_each_end_has_its_state(tmp_path: Path) -> None:
    one = run(tmp_path)
    with recorded(one):
        assert stands(tmp_path) == ("running", 3, 8, "")
        one.done, one.stopped_by = 5, "SIGUSR1"
    assert stands(tmp_path) == ("stopped", 5, 8, "SIGUSR1")
    one.done, one.stopped_by = 8, None
    with recorded(one):
        pass
    assert stands(tmp_path) == ("finished", 8, 8, "")
    with pytest.raises(RunError), recorded(one):
        raise RunError("an engine\nis lost")
    assert stands(tmp_path) == ("failed", 8, 8, "RunError: an engine is lost")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_one_rank_writes(tmp_path: Path) -> None:
    with recorded(run(tmp_path, rank=1)):
        pass
    assert not any(tmp_path.iterdir())


def test_a_status_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run's own"), recorded(run(tmp_path / "absent")):
        raise RunError("the run's own")
