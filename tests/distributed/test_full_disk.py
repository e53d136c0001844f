"""On a full disk, saved checkpoints stay intact, and the run continues, or saves its state and ends with one line.

The disk is a real file system of a megabyte or two, mounted in a namespace of the rank; skipped where that is not
allowed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.store import check_contents, checkpoints_of, read_manifest
from oblr_megatron.errors import UnwrittenError
from oblr_megatron.metrics import MetricsWriter, read_metrics
from oblr_megatron.observe.status import read_status
from oblr_megatron.preflight import checklist
from oblr_megatron.rollout.step_file import read_step, step_path, write_step
from tests.distributed.launch import RankError, run_ranks
from tests.distributed.replayed import certain, config_of, make_inputs, train, train_here

CLONE_NEWNS = 0x20000  # linux/sched.h
TWO = ("checkpoint.every_steps=2", "checkpoint.keep_last=4")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def mount(directory: Path, size: str) -> None:
    """A new, empty file system of this size, seen by this process alone."""
    directory.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise PermissionError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], check=True)


def on_small_disk(work: Callable[[Path, Path], None], inputs: Path, tmp_path: Path) -> None:
    """Call `work(inputs, mounted directory)` in a rank."""
    try:
        run_ranks(mount, 1, tmp_path / "probe", "1m")
    except RankError as error:
        if "PermissionError" in str(error) or "CalledProcessError" in str(error):
            pytest.skip("this user may not mount a file system")
        raise
    run_ranks(_mounted, 1, work, inputs, tmp_path / "disk")


def _mounted(work: Callable[[Path, Path], None], inputs: Path, directory: Path) -> None:
    mount(directory, "1m" if work is full_while_writing else "1600k")
    work(inputs, directory)


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of all checkpoints, each of which must be intact."""
    for path in checkpoints_of(run_dir):
        manifest = read_manifest(path)
        check_contents(path, manifest, manifest.files)
    return [read_manifest(path).step for path in checkpoints_of(run_dir)]


def refused_at_the_start(inputs: Path, disk: Path) -> None:
    status, said = train_here(config_of(inputs, disk / "run"))
    assert status == 2 and "no room: " in said and said.count("error: ") == 1
    assert not (disk / "run").exists()


def full_while_writing(inputs: Path, disk: Path) -> None:
    """The check of free space passes, as if a neighbour filled the disk right after it."""
    store.RESERVE_BYTES = -(10**9)
    status, said = train_here(config_of(inputs, disk / "run", *TWO, "checkpoint.export_hf=false"))
    assert status == 1 and read_status(disk / "run").state != "finished", "its last steps are not saved"
    assert said.count("was not saved: ") == 4 and "No space left" in said, said
    assert saved_steps(disk / "run") == [2]
    assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    assert len(certain(disk / "run")) == 8


def no_room_for_the_next(inputs: Path, disk: Path) -> None:
    """The check before the run passes, as if a neighbour filled the disk later."""
    store.FIXED_BYTES, store.RESERVE_BYTES = 200_000, 0
    checklist.check_room = lambda *_: None  # in this process
    status, said = train_here(config_of(inputs, disk / "run", *TWO, "checkpoint.export_hf=false"))
    assert status == 1 and read_status(disk / "run").state == "failed"
    assert said.count("no room: ") == 3, said  # twice at a save, then as the reason
    assert saved_steps(disk / "run") == [4, 2]


def filled_by_a_killed_save(inputs: Path, disk: Path) -> None:
    """Its first save, on another node, as before a requeue: a resume removes what it left."""
    store.FIXED_BYTES, store.RESERVE_BYTES = 200_000, 0
    partial = disk / "run" / "checkpoints" / ".step_00000004.other-node-1-0.partial"
    partial.mkdir(parents=True)
    (disk / "run" / "config.json").touch()
    free = os.statvfs(disk)
    (partial / "__0_0.distcp").write_bytes(bytes(free.f_bavail * free.f_frsize - 2**16))
    overrides = ("checkpoint.resume=newest", "checkpoint.every_steps=8", "checkpoint.export_hf=false")
    status, said = train_here(config_of(inputs, disk / "run", *overrides))
    assert status == 0 and not partial.exists(), said
    assert saved_steps(disk / "run") == [8]


def full_for_a_while(inputs: Path, disk: Path) -> None:
    """A step's line fits partly; the part must not stay."""
    with MetricsWriter(disk / "run") as metrics:
        for step in range(1, 400):
            if step == 2:
                fill(disk / "neighbour")
            if step == 300:
                assert read_metrics(disk / "run")[-1]["step"] < 299
                (disk / "neighbour").unlink()
            metrics.write(step, {"lr": step / 7, "loss": step / 3})
            assert not (disk / "run" / "metrics.jsonl").read_text().partition("\n")[2].rpartition("\n")[2]
    assert [record["step"] for record in read_metrics(disk / "run")] == [*range(1, 400)]


def full_of_samples(inputs: Path, disk: Path) -> None:
    """Samples that do not fit leave no part of a file, and the earlier ones stay whole."""
    saved = read_step(step_path(inputs / "rollouts", 1))
    write_step(disk, saved)
    fill(disk / "neighbour")
    with pytest.raises(UnwrittenError, match="No space left"):
        write_step(disk, replace(saved, step=2))
    assert sorted(path.name for path in disk.iterdir()) == ["neighbour", "step_000001.parquet"]
    assert read_step(step_path(disk, 1)) == saved


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    "work",
    [
        refused_at_the_start,
        full_while_writing,
        no_room_for_the_next,
        filled_by_a_killed_save,
        full_for_a_while,
        full_of_samples,
    ],
)
def test_a_full_disk(work: Callable[[Path, Path], None], inputs: Path, tmp_path: Path) -> None:
    on_small_disk(work, inputs, tmp_path)


def test_samples_that_cannot_be_written(inputs: Path, tmp_path: Path) -> None:
    """Rank 0 alone writes, and a directory is in its way: both ranks save the steps before, and a resume goes on.

    The write fails at its rename, so that a whole partial file is left to be removed.
    """
    run_dir, obstacle = tmp_path / "run", step_path(tmp_path / "run" / "rollouts", 4)
    obstacle.mkdir(parents=True)
    (run_dir / "config.json").touch()  # the directory of a run that did nothing yet
    config = config_of(inputs, run_dir, "rollout.save=true", "checkpoint.resume=newest")
    said = train(config, 2, status=1)
    assert said.count("error: rank 0: cannot write the samples of step 4: ") == 1, said
    assert "the run cannot go on; " in said and "Traceback" not in said
    assert saved_steps(run_dir) == [3] and len(certain(run_dir)) == 3
    assert [path.name for path in (run_dir / "rollouts").iterdir() if path.name.startswith(".")] == []
    obstacle.rmdir()
    train(config, 2)
    assert read_step(obstacle).step == 4 and len(certain(run_dir)) == 8
