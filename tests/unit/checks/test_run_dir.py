"""Which directories a run may write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from oblr_megatron.checks.run_dir import check_run_dir
from oblr_megatron.errors import UserError


@pytest.mark.parametrize("holds_run", [False, True])
def test_a_run_that_ended_while_it_was_opened_can_be_started_again(tmp_path: Path, holds_run: bool) -> None:
    """Its engine may have written a log, and SIGKILL leaves the lock file; config.json comes later."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").touch()
    (tmp_path / "lock.json").touch()
    check_run_dir(tmp_path, holds_run=holds_run)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError) as caught:
        check_run_dir(tmp_path, holds_run=holds_run)
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("mark", ["config.json", "checkpoints/step_00000004/checkpoint.json"])
def test_a_run_is_resumed_and_not_overwritten(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    check_run_dir(tmp_path, holds_run=True)
    with pytest.raises(UserError) as caught:
        check_run_dir(tmp_path)
    assert "--resume" in caught.value.fix
