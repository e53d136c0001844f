"""`rollout.overlap = "one_step"` with real vLLM: a step trains on samples that are one update old.

Also: two ranks, a resumed run, an engine that is killed while the trainer works. The gradient with importance ratios is
compared with an oracle in tests/unit/norms. Not covered: CUDA, speed (tools/bench/overlap.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.engine.protocol import SamplingRequest, call_seed
from oblr_megatron.rollout.ahead import Ahead
from oblr_megatron.rollout.step_file import SavedStep, read_step, step_path
from tests.e2e.conftest import records
from tests.e2e.forked import forked
from tests.e2e.tiny_rollout import make_config, make_prompts, start
from tests.tiny import make_hf_dir

STEPS = 4
COMMON: dict[str, object] = {"num_steps": STEPS, "rollout__save": "true", "checkpoint__export_hf": "false"}
ONE_STEP: dict[str, object] = {"rollout__overlap": "one_step", "rollout__max_staleness": 1}
STILL = {"optimizer__lr": 1e-30}  # the weights stay those of the first step


@pytest.fixture(scope="module")
def run(overrides: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one_step") / "run"
    train(1, overrides(run_dir, **COMMON, **ONE_STEP))
    return run_dir


def train(ranks: int, keys: list[str]) -> None:
    result = forked(ranks, keys)
    assert result.returncode == 0, result.stderr[-3000:]


def saved(run_dir: Path) -> list[SavedStep]:
    return [read_step(step_path(run_dir / "rollouts", step)) for step in range(1, STEPS + 1)]


def drawn(step: SavedStep) -> list[tuple[Any, ...]]:
    return [(sample.prompt_ids, sample.response_ids) for sample in step.samples]


def test_samples_are_one_update_old_and_drawn_from_those_weights(
    run: Path, overrides: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The second step's samples are those of a run with a rate of 1e-30: the first weights drew them."""
    steps = records(run)
    assert [step["rollout/staleness_max"] for step in steps] == [0, 1, 1, 1]
    assert [{sample.version for sample in step.samples} for step in saved(run)] == [{0}, {0}, {1}, {2}]
    assert steps[1]["rollout/logprob_abs_diff"] > 10 * steps[0]["rollout/logprob_abs_diff"]
    train(1, overrides(tmp_path / "still", **COMMON, **STILL))
    still, moved = saved(tmp_path / "still"), saved(run)
    assert [drawn(step) for step in moved[:2]] == [drawn(step) for step in still[:2]]
    assert drawn(moved[2]) != drawn(still[2]), "the second update was pushed"


def test_two_ranks_take_the_same_samples(run: Path, overrides: Callable[..., list[str]], tmp_path: Path) -> None:
    train(2, overrides(tmp_path / "two", **COMMON, **ONE_STEP))
    for one, two in zip(records(run), records(tmp_path / "two"), strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "rollout/staleness_max"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), name


def test_a_resumed_run_samples_the_next_step_again(
    run: Path, overrides: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The checkpoint after step 2 holds the data before the prompts of step 3, which was sampled already."""
    keys = COMMON | ONE_STEP | {"checkpoint__every_steps": 1, "checkpoint__export_hf": "true"}
    train(1, overrides(tmp_path / "run", **keys | {"num_steps": 2}))
    train(1, overrides(tmp_path / "run", **keys, checkpoint__resume="newest"))
    assert [step["rollout/staleness_max"] for step in records(tmp_path / "run")] == [0, 1, 0, 1]
    unbroken, resumed = saved(run), saved(tmp_path / "run")
    assert [step.prompts for step in resumed] == [step.prompts for step in unbroken]
    assert {sample.version for sample in resumed[2].samples} == {2}


class Prompts:
    """A source of prompts that counts what was taken."""

    num_skipped = taken = 0

    @property
    def epoch(self) -> int:
        return self.taken // 16  # prompts of a pass

    def next_prompts(self, count: int) -> list[Any]:
        self.taken += count
        return make_prompts(count)

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["index"]


def test_a_killed_engine_samples_the_same_again(tmp_path: Path) -> None:
    """It dies while the trainer works; the trainer notices before its update, so the same weights are pushed again."""
    model = make_hf_dir(tmp_path / "model", head_dim=32)
    config = make_config(model, tmp_path / "run", max_num_seqs=8, max_restarts=1).model_copy(update={"num_prompts": 16})
    engines = start(model, tmp_path / "run", max_num_seqs=8, max_restarts=1)
    try:
        ahead = Ahead(engines, Prompts(), config, step=5)
        assert (ahead.position, ahead.epoch) == ({"index": 0}, 0), "of the step before"
        assert engines._engine is not None
        engines._engine._process.kill()
        found = ahead.finish()
        assert engines.metrics()["rollout/restarts"] == 1
        assert found == ahead.finish(), "asking again changes nothing"
        request = SamplingRequest.for_training(config, call_seed(config.seed, 5))
        whole = engines.generate(ahead.prompts, request)
        same = sum(one.response_ids == other.response_ids for one, other in zip(found, whole, strict=True))
        assert same > 0.9 * len(whole), "a batch of another shape may round a draw differently"
    finally:
        engines.close()
