"""The lock of a run directory: one holder, released by any death, stale on other machines by its heartbeat.

Not covered: file systems without kernel locks between machines; a lock of another boot stands for them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oblr_megatron.errors import EXIT_RUN, UserError
from oblr_megatron.runtime import run_lock
from oblr_megatron.runtime.run_lock import LOCK_FILE, Owner, check_unlocked

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom oblr_megatron.runtime.run_lock import run_lock\n"
    "with run_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    input()\n"
)


def holder(directory: Path) -> subprocess.Popen[bytes]:
    """A process that holds the lock until a line arrives."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    return child


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert run_lock.holder(tmp_path / "config.toml") == (False, None)


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as child:
        for attempt in (lambda: check_unlocked(tmp_path / "run"), run_lock.run_lock(tmp_path / "run").__enter__):
            with pytest.raises(UserError) as caught:
                attempt()
            assert caught.value.where == str(tmp_path / "run") and f"process {child.pid} on " in caught.value.what
        child.communicate(b"\n")
    check_unlocked(tmp_path / "run")
    with run_lock.run_lock(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK_FILE).exists()


def test_sigkill_releases_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        child.kill()
    assert (tmp_path / LOCK_FILE).exists()
    check_unlocked(tmp_path)
    with run_lock.run_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_directories_that_stay_empty_are_removed(tmp_path: Path) -> None:
    with run_lock.run_lock(tmp_path / "a" / "b"):
        pass
    assert not list(tmp_path.iterdir())
    with run_lock.run_lock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["metrics.jsonl"]


def of_elsewhere(directory: Path, heartbeat: float) -> Owner:
    """Write the lock of a run on another machine."""
    owner = replace(Owner.me(), host="node9", process="another-boot:1:2:3", heartbeat=heartbeat)
    (directory / LOCK_FILE).write_text(json.dumps(asdict(owner)))
    return owner


def test_a_run_on_another_machine_that_beats_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 20.0)
    owner = of_elsewhere(tmp_path, time.time() - 30)
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_WRONLY)
    beats = run_lock.repeated(lambda: run_lock._write(descriptor, owner), 0.5)
    with beats, pytest.raises(UserError) as caught, run_lock.run_lock(tmp_path):
        pass
    os.close(descriptor)
    assert f"process {owner.pid} on node9 since" in caught.value.what


@pytest.mark.parametrize(("age", "waits"), [(30.0, True), (3600.0, False)])
def test_a_heartbeat_that_stands_still_makes_a_lock_stale(
    age: float, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.5)
    of_elsewhere(tmp_path, time.time() - age)
    with run_lock.run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == Owner.me().pid
    assert ("node9" in capfd.readouterr().out) == waits


@pytest.mark.parametrize("alive", [False, True])
def test_a_lock_that_the_file_server_keeps_for_a_dead_machine_is_taken(
    alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "LOST_S", 3.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a busy disk would look like a dead owner
    owner = of_elsewhere(tmp_path, time.time() - 70)
    descriptor = os.open(tmp_path / LOCK_FILE, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    beats = run_lock.repeated(lambda: run_lock._write(descriptor, owner), 0.5) if alive else nullcontext()
    with beats, pytest.raises(UserError) if alive else nullcontext(), run_lock.run_lock(tmp_path):
        assert not alive and json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == Owner.me().pid
    os.close(descriptor)


def test_a_colleague_of_the_group_may_resume(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with run_lock.run_lock(tmp_path):
            assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_the_heartbeat_goes_on_while_the_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.02)
    beats, flushed = set(), []
    monkeypatch.setattr(os, "fsync", flushed.append)  # else other machines would see it half a minute later
    with run_lock.run_lock(tmp_path):
        end = time.monotonic() + 10
        while len(beats) < 3 and time.monotonic() < end:
            beats.add(json.loads((tmp_path / LOCK_FILE).read_text())["heartbeat"])
    assert len(beats) == 3 <= len(flushed)


def test_without_kernel_locks_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with holder(tmp_path) as child:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(UserError) as caught, run_lock.run_lock(tmp_path):
            pass
        assert str(child.pid) in caught.value.what
        child.kill()
    with run_lock.run_lock(tmp_path):
        pass


def test_a_run_whose_lock_another_one_took_ends_and_leaves_the_lock(tmp_path: Path) -> None:
    slow = HOLD.replace("with run_lock", "run_lock.__globals__['HEARTBEAT_S'] = 0.05\nwith run_lock")
    with subprocess.Popen(
        [sys.executable, "-c", slow, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        other = of_elsewhere(tmp_path, time.time())
        child.send_signal(signal.SIGCONT)
        assert child.wait(timeout=60) == EXIT_RUN
        error = child.stderr.read() if child.stderr else b""
    assert b"another run took the lock of run_dir" in error and b"on node9 since" in error and b"Fix: " in error
    assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == other.process
