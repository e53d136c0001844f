"""How old a sample may be. Not covered: how an old sample changes the gradient (unit/algo/test_importance.py)."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oblr_megatron.errors import RunError
from oblr_megatron.observe.step_metrics import StepRecord
from oblr_megatron.rollout.replay import ReplayEngine
from oblr_megatron.rollout.staleness import StaleSampleError, check_batch, staleness
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.sampling import Sampling
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Prompt, Sample
from tests.unit.configs import config_with


def test_age_of_the_oldest():
    assert staleness([], current=5, limit=0) == 0
    assert staleness([5, 5], current=5, limit=0) == 0
    assert staleness([5, 3, 4], current=5, limit=2) == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_older_ones_are_refused(limit):
    with pytest.raises(StaleSampleError, match=rf"3.*2 updates.*5; rollout.max_staleness is {limit}$"):
        staleness([5, 3], current=5, limit=limit)


def test_newer_ones_are_refused_whatever_the_limit():
    with pytest.raises(StaleSampleError, match=r"6.*5") as caught:
        staleness([5, 6], current=5, limit=100)
    assert caught.value.raised_on_all_ranks, "every rank has the same samples, and the state is saved"


@pytest.mark.parametrize(("count", "version"), [(2, 0), (1, 1)])
def test_wrong_batches_are_refused_on_every_rank(count: int, version: int) -> None:
    samples = [Sample(0, (3,), (4,), (-1.0,), "", "stop", version=0)]
    check_batch(samples, 1, 0)
    with pytest.raises(RunError, match="returned 1 samples") as caught:
        check_batch(samples, count, version)
    assert caught.value.raised_on_all_ranks


@pytest.mark.parametrize("limit", [0, 1])
def test_a_step_checks_its_samples(tmp_path: Path, limit: int) -> None:
    """Saved samples of version 0, and a trainer that has made one update."""
    prompts = [Prompt(0, "0", "", (3,), "", "")]
    samples = [Sample(0, (3,), (4, 5), (-1.0, -1.0), "", "stop", version=0)]
    write_step(tmp_path, SavedStep(1, 1.0, 0, 0, prompts, samples, [0.0]))
    rollout = {"replay": str(tmp_path), "max_staleness": limit}
    config = config_with(group_size=1, algo={"baseline": "none"}, rollout=rollout)
    engine = ReplayEngine(config, SimpleNamespace(rank=0))  # type: ignore[arg-type]
    parts: Any = SimpleNamespace(config=config, engines=engine, timer=PhaseTimer(), version=1, ahead=None)
    parts._check_age = partial(Sampling._check_age, parts)
    record = StepRecord(done=1)
    if limit == 0:
        with pytest.raises(StaleSampleError):
            Sampling.rollout(parts, engine.next_prompts(1), record)
    else:
        assert Sampling.rollout(parts, engine.next_prompts(1), record) == samples
        assert record.metrics == {"rollout/staleness_max": 1}
