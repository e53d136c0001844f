"""Which directories a run may write into."""

from __future__ import annotations

import errno
import genericpath
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.checkpoint.resume import check_no_progress
from oblr_megatron.checkpoint.store import check_absent, check_replaceable
from oblr_megatron.checks.run_dir import LOCK_FILE, check_run_dir, check_shared
from oblr_megatron.errors import UserError


def test_a_node_on_whose_disk_the_run_directory_is_another_one_is_named(tmp_path: Path) -> None:
    """Otherwise the first save would fail, hours later. On NFS the file may appear late."""
    with pytest.raises(UserError) as caught:
        check_shared(tmp_path, 0.0)
    assert socket.gethostname() in caught.value.what and caught.value.where == str(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(check_shared, tmp_path, 60.0)
        (tmp_path / LOCK_FILE).touch()
        assert looking.result() is None


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


def test_exports_may_be_linked_to_a_larger_disk_before_the_first_start(tmp_path: Path) -> None:
    run_dir, larger = tmp_path / "run", tmp_path / "larger"
    run_dir.mkdir()
    larger.mkdir()
    (run_dir / "hf").symlink_to(larger)
    (run_dir / "adapter_best").symlink_to(tmp_path / "absent")
    check_run_dir(run_dir)
    check_no_progress(run_dir)  # of a resume, with which every job starts
    (larger / "notes.txt").touch()
    for check in (check_run_dir, check_no_progress):
        with pytest.raises(UserError):
            check(run_dir)


@pytest.mark.parametrize("mark", ["config.json", "checkpoints/step_00000004/checkpoint.json"])
def test_a_run_is_resumed_and_not_overwritten(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    check_run_dir(tmp_path, holds_run=True)
    with pytest.raises(UserError) as caught:
        check_run_dir(tmp_path)
    assert "--resume" in caught.value.fix


@pytest.mark.parametrize("folder", ["checkpoints", "rollouts", "logs"])
def test_a_folder_that_an_earlier_attempt_wrote_as_another_user(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / "config.json").touch()
    check_run_dir(tmp_path, holds_run=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != folder)
    with pytest.raises(UserError, match=f"the run's folder {folder} cannot be created: .* not a writable directory"):
        check_run_dir(tmp_path, holds_run=True)


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that nobody may enter, not even root."""
    place, stat = tmp_path / "locked", os.stat
    place.mkdir()

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if place in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "lstat", lambda path, **options: refuse(path, follow_symlinks=False, **options))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place)
    monkeypatch.setattr(os.path, "exists", genericpath.exists)  # by os.stat; C code has its own call
    monkeypatch.setattr(os.path, "isdir", genericpath.isdir)
    monkeypatch.setattr(os.path, "lexists", genericpath.exists)
    return place


def test_below_a_directory_that_the_user_may_not_enter(locked: Path) -> None:
    with pytest.raises(UserError, match=f"run_dir cannot be created: {locked} is not a writable directory"):
        check_run_dir(locked / "runs" / "one")
    with pytest.raises(UserError, match=f"the target cannot be created: {locked} is not a writable directory"):
        check_absent(locked / "models" / "hf")


@pytest.mark.parametrize("check", [check_absent, check_replaceable])
def test_a_mount_point_is_no_target(check: Callable[[Path], None]) -> None:
    """The system cannot rename a directory to a mount point."""
    with pytest.raises(UserError, match=r"is a mount point \[/proc\]. Fix: name a directory inside it"):
        check(Path("/proc"))
