"""RUN_DIR/status.json: what a run says of itself to the script that started it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.cli import main
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.observe import status
from oblr_megatron.observe.status import STATUS_FILE, Status, finished, read_status, recorded, write_status
from oblr_megatron.runtime.processes import identity
from oblr_megatron.runtime.run_lock import STALE_S, Owner, run_lock


def run(directory: Path, rank: int = 0) -> Any:
    """What `recorded` looks at."""
    config = SimpleNamespace(run_dir=directory, num_steps=8)
    parallel, stop = SimpleNamespace(rank=rank), SimpleNamespace()
    return SimpleNamespace(parallel=parallel, config=config, stop=stop, start=3, done=0, stopped_by=None)


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
    assert stands(tmp_path) == ("failed", 8, 8, "an engine is lost")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "status.json"]
    assert "RunError: an engine" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_a_lost_peer_is_named_without_the_text_of_gloo(tmp_path: Path) -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711. GLHF!")
    with pytest.raises(RuntimeError), recorded(run(tmp_path)):
        raise error
    assert stands(tmp_path)[3] == "lost another rank at 127.0.0.1: Connection closed by peer"
    assert "GLHF!" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_the_status_of_a_run_that_goes_on_has_its_true_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOOK_S", 0.02)
    one = run(tmp_path)
    with recorded(one):
        first, one.done = read_status(tmp_path), 6
        end = time.monotonic() + 60  # a busy disk
        while read_status(tmp_path).step == 3 and time.monotonic() < end:
            time.sleep(0.01)
        now = read_status(tmp_path)
        assert (now.state, now.step, now.pid) == ("running", 6, os.getpid()) and now.unix_time > first.unix_time
        monkeypatch.setattr(status, "HEARTBEAT_S", 0.02)
        while read_status(tmp_path).unix_time == now.unix_time and time.monotonic() < end:
            time.sleep(0.01)
        assert read_status(tmp_path).unix_time > now.unix_time, "also within a step"
        one.stop.at_once("SIGINT, twice")
        assert stands(tmp_path)[0] == "failed" and stands(tmp_path)[3] == "SIGINT, twice"


def test_a_killed_run_is_lost(tmp_path: Path) -> None:
    """Killed on this machine: its process is gone. On another machine: its heartbeat is old."""
    with subprocess.Popen(["sleep", "60"]) as child:
        me = Owner.me()
        here = me.process.rsplit(":", 2)[0]
        going = Status("running", 4, 9, "", time.time(), child.pid, me.host, f"{here}:{identity(child.pid)}")
        write_status(tmp_path, going)
        assert read_status(tmp_path) == going and str(going).startswith("running: step 4 of 9, process ")
        child.kill()
    assert read_status(tmp_path).state == "lost" and "--resume" in str(read_status(tmp_path))
    for age, state in ((5.0, "running"), (STALE_S + 5.0, "lost")):
        write_status(tmp_path, replace(going, process="another-boot:1:2:3", unix_time=time.time() - age))
        assert read_status(tmp_path).state == state


def test_a_resumed_run_that_waits_for_its_engines_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds the lock, and status.json is that of the run before it. A first run has none yet."""
    with run_lock(tmp_path):
        assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"starting: process {os.getpid()} on ")
    assert main(["status", str(tmp_path)]) == 2
    capsys.readouterr()
    write_status(tmp_path, Status("failed", 4, 9, "no memory", time.time() - 300, 1, "n3", "another-boot:1:2:3"))
    for held in (True, False):
        with run_lock(tmp_path) if held else nullcontext():
            assert main(["status", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(f"starting: process {os.getpid()} on " if held else "failed: step 4")


def test_a_finished_run_has_done_all_steps_and_its_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(num_steps: int, *, export_hf: bool = False, resume: str = "newest") -> bool:
        checkpoint, rollout = SimpleNamespace(export_hf=export_hf, resume=resume), SimpleNamespace(only=False)
        fields = {"run_dir": tmp_path, "num_steps": num_steps, "checkpoint": checkpoint, "rollout": rollout}
        return finished(SimpleNamespace(**fields))  # type: ignore[arg-type]

    assert not ask(8)
    with pytest.raises(UserError) as caught:
        read_status(tmp_path)
    assert caught.value.where == str(tmp_path / STATUS_FILE)
    one = run(tmp_path)
    with recorded(one):
        assert not ask(3), "it goes on"
        one.done = 8
    assert not ask(9) and not ask(8, export_hf=True) and not ask(8, resume="none")
    assert capsys.readouterr().out == ""
    (tmp_path / "hf").mkdir()
    before = read_status(tmp_path)
    assert ask(8) and ask(8, export_hf=True) and ask(8, resume="old/checkpoints/step_00000004")
    assert "step 8 of 8" in capsys.readouterr().out and read_status(tmp_path).unix_time > before.unix_time
    (tmp_path / "config.json").write_text('{"rollout": {"only": true}}')
    assert not ask(8), "it has only sampled"


def test_one_rank_writes(tmp_path: Path) -> None:
    with recorded(run(tmp_path, rank=1)):
        pass
    assert not any(tmp_path.iterdir())


def test_a_status_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run's own"), recorded(run(tmp_path / "absent")):
        raise RunError("the run's own")


def test_a_status_without_permission_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix for a damaged one is to remove it."""

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match="cannot read the status: Permission denied") as caught:
        read_status(tmp_path)
    assert caught.value.fix == "make it readable"
