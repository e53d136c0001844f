"""Trackers that refuse, hang, die or find the disk full: they cost the run nothing but their records, and a line.

Not covered: errors that a package's server reports after it accepted a record.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oblr_megatron.metrics import Record, read_metrics
from oblr_megatron.observe.trackers import feed
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.observe.trackers.registry import check_trackers
from oblr_megatron.runtime.processes import children_of
from tests.unit.observe.following import ADDRESSES, configured, follow
from tests.unit.processes.test_pool import is_running
from tests.unit.waiting import until

pytestmark = pytest.mark.slow  # a process a tracker, which imports its package


def test_an_address_that_refuses_costs_the_run_its_deadline_at_most(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses("wandb", offline, monkeypatch)


def refuses(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow a run while the tracker's server refuses."""
    for variable, value in ADDRESSES[name].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 8.0)
    config = configured(folder / "run", name)
    before = set(children_of(os.getpid()))
    said = follow(config, range(1, 4))
    assert [record["step"] for record in read_metrics(config.run_dir)] == [1, 2, 3]
    assert said and said[-1].startswith(f"tracker {name}: ")
    assert set(children_of(os.getpid())) <= before, "a child of earlier tests may end meanwhile"


TRACKER = """
import os, time
from pathlib import Path
from oblr_megatron.observe.trackers.base import Tracker

class Hanging(Tracker):
    def log(self, step, values):
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")
        Path(self.run.run_dir, "children").write_text(Path("/proc/self/task", str(os.getpid()), "children").read_text())
        time.sleep(300)

class Raising(Tracker):
    def log(self, step, values):
        if step == 2:
            raise OSError(28, "No space left on device")
        Path(self.run.run_dir, f"step-{step}").touch()

class Dying(Tracker):
    def log(self, step, values):
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trackers of an installed package, found by their entry points."""
    site = tmp_path / "site"
    (site / "foreign-1.0.dist-info").mkdir(parents=True)
    (site / "foreign-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    entries = "".join(f"{name} = foreign:{name.title()}\n" for name in ("hanging", "raising", "dying"))
    (site / "foreign-1.0.dist-info" / "entry_points.txt").write_text(f"[oblr_megatron.trackers]\n{entries}")
    (site / "foreign.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield


def test_a_tracker_that_hangs_is_ended_with_its_children(
    tmp_path: Path, foreign: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 8.0)
    config, said = configured(tmp_path / "run", "hanging", "raising"), []
    check_trackers(config.log.trackers)
    with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
        trackers.start()
        for step in range(1, 4):
            trackers.log({"step": step, "lr": 0.5})
        until(lambda: all((config.run_dir / name).exists() for name in ("children", "step-3")))
    hanging, raising = [line for line in said if "were lost" in line]
    assert hanging.startswith("tracker hanging: 4 of 5 records were lost")  # log x 3 and close
    assert "not done within 8 s" in hanging
    assert raising.startswith("tracker raising: 1 of 5 records were lost") and "No space left" in raising
    children = [int(pid) for pid in (config.run_dir / "children").read_text().split()]
    assert children
    until(lambda: not any(map(is_running, children)))


def test_a_step_never_waits_for_a_tracker(tmp_path: Path, foreign: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the queue and a pipe hold: the rest is lost at once, and counted.

    The kernel counts how often the thread blocked. A clock would also count other work of a busy machine.
    """
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 1.0)
    config, said = configured(tmp_path / "run", "hanging"), []
    record: Record = {"step": 1, **{f"eval/{number}/accuracy": 0.5 for number in range(200)}}
    with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
        trackers.start()
        waits, used = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
        for _ in range(3000):
            trackers.log(record)
        assert time.thread_time() - used < 5
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits < 300, "of 3,000 records"
    assert re.match("tracker hanging: 3,00[12] of 3,002 records were lost", said[-1])  # 3,001 if it was opened


def test_a_tracker_that_dies_loses_its_records_only(tmp_path: Path, foreign: None) -> None:
    """It is said with the next record, not only at the end of the run."""
    config, said = configured(tmp_path / "run", "dying", "tensorboard"), []
    with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
        trackers.start()
        trackers.log({"step": 1, "lr": 0.5})
        until(lambda: trackers.log({"step": 2, "lr": 0.5}) or said)
        assert said[0].startswith("tracker dying: its process has ended; the run goes on, see ")
    assert len(said) == 2 and re.match(r"tracker dying: \d+ of \d+ records were lost: its process has ended;", said[1])
    assert list((config.run_dir / "tensorboard").iterdir())


def test_a_process_that_no_signal_ends_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a file server: the kernel ends it when the server answers."""

    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "this would never return"
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(feed.subprocess, "Popen", Stuck)
    stuck = feed.TrackerFeed("tensorboard", tmp_path / "log")
    stuck.finish()
    assert not stuck.join(0.0)
    monkeypatch.undo()
    assert stuck._process is not None
    subprocess.Popen.wait(stuck._process, 60.0)


def limited(action: Callable[[], None], size: int) -> None:
    """Run an action while no process may write a file above `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
@pytest.mark.parametrize("size", [2_000, 30_000])
def test_a_full_disk_ends_no_run_and_is_said(offline: Path, name: str, size: int) -> None:
    """Not even the config fits, or some records do."""
    fills_the_disk(name, size, offline)


def fills_the_disk(name: str, size: int, folder: Path) -> None:
    """Follow a run whose tracker may write no file above `size` bytes."""
    config, said = configured(folder / "run", name), []

    def attempt() -> None:
        with Trackers(config, said.append, rank=0, resume_step=None) as trackers:
            trackers.start()
            for step in range(1, 60):
                trackers.log({"step": step, **{f"eval/{number}/accuracy": 0.5 + step for number in range(100)}})

    limited(attempt, size)
    assert re.match(rf"tracker {name}: \d+ of 61 records were lost: .*(too large|disk)", said[-1])


def test_a_killed_run_leaves_no_process(offline: Path) -> None:
    script = f"""
import os, signal, time
from tests.unit.observe.following import configured, Path
from oblr_megatron.observe.trackers.feed import Trackers
config = configured(Path({str(offline / "run")!r}), "wandb", "tensorboard")
with Trackers(config, print, rank=0, resume_step=None) as trackers:
    trackers.start()
    trackers.log({{"step": 1, "lr": 0.5}})
    while not (config.run_dir / "wandb").exists() or any(feed.lost for feed in trackers._feeds):
        time.sleep(0.1)
    from oblr_megatron.observe.trackers.feed import _family
    print(*_family(os.getpid())[1:], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    family = [int(pid) for pid in result.stdout.split()]
    assert len(family) >= 3  # one a tracker, and wandb's service
    until(lambda: not any(map(is_running, family)))
