"""When the profiler records, and which settings are refused. Not covered: torch's trace (test_rank_timers.py), nsys."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from oblr_megatron.config import Config, LogConfig
from oblr_megatron.errors import UserError
from oblr_megatron.observe.performance.profiler import Profiler, TorchProfile, check_profile, open_profiler
from oblr_megatron.timing import PhaseTimer
from tests.unit.configs import config_with


class Diary:
    """A backend that keeps the calls it receives."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("start")

    def stop(self) -> str:
        self.asked.append("stop")
        return "there it is"

    def range(self, name: str) -> AbstractContextManager[object]:
        self.asked.append(name)
        return nullcontext()


def asked_in(steps: range, start: int, end: int) -> list[str]:
    """The backend's calls in a run of these steps; each step has one phase and ends with a checkpoint."""
    diary, said = Diary(), list[str]()
    profiler = Profiler(diary, start, end, said.append)
    timer = PhaseTimer(context=profiler.phase)
    with timer("push"):
        pass
    timer.finish_step()
    for step in steps:
        profiler.begin_step(step)
        diary.asked.append(str(step))
        with timer("gradient"):
            pass
        timer.finish_step()
        profiler.end_step()
        with timer("checkpoint"):
            pass
    profiler.close()
    assert said == ["there it is"] * diary.asked.count("stop")
    return diary.asked


def test_the_steps_asked_for_are_recorded() -> None:
    gradient = "oblr/gradient"
    assert asked_in(range(4), 1, 3) == ["0", "start", "1", gradient, "oblr/checkpoint", "2", gradient, "stop", "3"]
    assert asked_in(range(2), 0, 1) == ["start", "0", gradient, "stop", "1"]


def test_a_run_that_begins_or_ends_among_these_steps_is_recorded_in_part() -> None:
    gradient = "oblr/gradient"
    assert asked_in(range(2, 4), 1, 3) == ["start", "2", gradient, "stop", "3"]
    assert asked_in(range(5, 7), 1, 3) == ["5", "6"]
    assert asked_in(range(2), 1, 9) == ["0", "start", "1", gradient, "oblr/checkpoint", "stop"]


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return config_with(*overrides, run_dir=tmp_path, num_steps=10)


def test_only_named_ranks_record(tmp_path: Path) -> None:
    config = config_of(tmp_path, "log.profile=torch", "log.profile_step_start=0")
    for rank, files in ((1, 0), (0, 1)):
        with open_profiler(config, rank, lambda _: None) as profiler:
            assert (profiler is not None) == bool(files)
            if profiler is not None:
                profiler.begin_step(0)
        assert len(list(tmp_path.glob("profile/*"))) == files


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the directory should be")
    profile = TorchProfile(tmp_path / "profile" / "rank_0.json.gz")
    profile.start()
    assert "could not be written" in profile.stop()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("log.profile_step_start=5", r"profile_step_end 5 .* log.profile_step_start 5"),
        ("log.profile_step_end=11", r"profile_step_end 11 .* num_steps 10"),
    ],
)
def test_steps_that_are_not_there_are_refused_by_the_config(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config_of(tmp_path, "log.profile=torch", override)


def test_profiles_that_this_machine_cannot_make_are_refused() -> None:
    with pytest.raises(UserError) as error:
        check_profile(LogConfig(profile="nsys"), on_gpu=False)
    assert error.value.where == "log.profile" and '"torch"' in error.value.fix
    check_profile(LogConfig(profile="nsys"), on_gpu=True)
    check_profile(LogConfig(profile="none"), on_gpu=False)
