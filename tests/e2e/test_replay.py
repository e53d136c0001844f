"""Runs that save their samples, and runs trained from saved samples: the same metrics, the same weights.

Not covered: single damaged files (tests/unit/rollout/test_replay.py), servers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file

from oblr_megatron import step_loop
from oblr_megatron.rollout.step_file import read_step, step_path
from tests.e2e.conftest import records
from tests.e2e.forked import CONFIG, call_forked, forked, forked_cli

Overrides = Callable[..., list[str]]

OF_SAMPLING = ("timing_s/", "perf/", "rollout/restarts")  # what a replay measures otherwise, or not at all
OF_ALL_SAMPLED = (
    "reward/",
    "groups/",
    "rollout/dynamic_batches",
)  # what dynamic sampling reports of more than is saved
TERMS = ("tests.e2e.rewards:right_length", "overlong", "tests.e2e.rewards:always_raises")
FURTHER = f'[{{name = "{TERMS[1]}", weight = 0.25}}, {{name = "{TERMS[2]}"}}]'


def succeed(result: CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def same_metrics(first: Path, second: Path, besides: tuple[str, ...] = OF_SAMPLING) -> None:
    """All records are equal bit for bit."""
    one, two = (
        [{name: value for name, value in step.items() if not name.startswith(besides)} for step in records(path)]
        for path in (first, second)
    )
    assert len(one) > 1 and len(one[0]) > 15
    assert one == two


def same_weights(first: Path, second: Path) -> None:
    one, two = (load_file(path / "hf" / "model.safetensors") for path in (first, second))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def train_without_vllm(arguments: list[str]) -> int:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]  # the fork server has it for engines
    status = step_loop.main(arguments)
    assert "vllm" not in sys.modules, "vllm was imported"
    return status


def test_a_replay_repeats_a_run_to_the_last_bit_without_vllm(tmp_path: Path, overrides: Overrides, saved: Path) -> None:
    a, b = saved, tmp_path / "b"
    assert sorted(path.name for path in (a / "rollouts").iterdir()) == [f"step_00000{n}.parquet" for n in (1, 2, 3)]
    keys = overrides(b, num_steps=3, evaluate__every_steps=1, data__train=tmp_path / "not-read.jsonl")
    said = succeed(call_forked(train_without_vllm, 1, [CONFIG, *keys, "--replay", str(a / "rollouts")], {}))
    assert said.count("replay: samples come from") == 1 and "eval/heldout/accuracy" not in records(b)[-1]
    assert not list((b / "logs").glob("engine-*")), "an engine was started"
    same_metrics(a, b)
    same_weights(a, b)
    assert all(step["rollout/logprob_abs_diff"] <= 1e-3 for step in records(b)), "sampled with its weights"
    keys = overrides(tmp_path / "c", num_steps=3, model__path=a / "hf")
    result = forked_cli(["train", CONFIG, *keys, "--replay", str(a / "rollouts")])
    assert result.returncode == 2 and "another model" in result.stderr and not (tmp_path / "c").exists()


@pytest.mark.nightly
def test_dynamic_sampling_on_two_ranks_and_its_replay(tmp_path: Path, overrides: Overrides) -> None:
    """The ranks agree on every refill, or the step would not end; the saved steps are the trained ones."""
    a, b = tmp_path / "a", tmp_path / "b"
    dynamic = {"num_steps": 3, "rollout__dynamic_sampling": "true", "group_size": 3}
    succeed(forked(2, [*overrides(a, **dynamic), "--save-rollouts"]))
    steps = records(a)
    for step, record in enumerate(steps, start=1):
        saved = read_step(step_path(a / "rollouts", step))
        rewards = torch.tensor(saved.rewards).view(8, 3)
        sampled = 8 + record["groups/dropped"] + record["groups/unused"]
        mixed = int((rewards.amax(-1) != rewards.amin(-1)).sum())
        assert mixed == 8 or record["rollout/dynamic_batches"] == 4
        assert record["groups/mixed_fraction"] == pytest.approx((mixed + record["groups/unused"]) / sampled)
        assert len({prompt.row for prompt in saved.prompts}) == 8
        assert record["weights/version"] == step and record["rollout/staleness_max"] == 0
        assert record["rollout/logprob_abs_diff"] <= 1e-3
    assert max(step["rollout/dynamic_batches"] for step in steps) > 1, "nothing was refilled"
    succeed(forked(2, [*overrides(b, **dynamic), "--replay", str(a / "rollouts")]))
    same_metrics(a, b, (*OF_SAMPLING, *OF_ALL_SAMPLED))
    same_weights(a, b)


@pytest.mark.nightly
def test_samples_first_training_later(tmp_path: Path, overrides: Overrides) -> None:
    """`--rollout-only` builds no model. Its second batch is stale for a trainer, unless max_staleness allows it."""
    a, b = tmp_path / "a", tmp_path / "b"
    command = ["train", CONFIG]
    succeed(forked_cli([*command, *overrides(a, num_steps=2), "--rollout-only"]))
    assert not (a / "hf").exists()
    assert [step["step"] for step in records(a)] == [1, 2] and "grad_norm" not in records(a)[0]
    assert (a / "report.html").exists()

    resumed = tmp_path / "resumed"
    succeed(forked_cli([*command, *overrides(resumed, num_steps=1), "--rollout-only"]))
    again = [*command, *overrides(resumed, num_steps=2), "--rollout-only", "--resume"]
    succeed(forked_cli([*again, "--dry-run", "--nnodes", "1", "--gpu-memory-gb", "80"]))  # as a requeued job does first
    said = succeed(forked_cli(again))
    assert "continues after step 1" in said
    assert [step["step"] for step in records(resumed)] == [1, 2]
    assert read_step(step_path(resumed / "rollouts", 2)) == read_step(step_path(a / "rollouts", 2))

    result = forked_cli([*command, "--replay", str(a / "rollouts"), *overrides(b, num_steps=2)])
    assert result.returncode == 2 and "1 updates before the trainer's version 1" in result.stderr, result.stderr
    assert not b.exists()
    changed = {"rollout__max_staleness": 1, "reward__name": "tests.e2e.rewards:right_length"}
    changed |= {"reward__terms": FURTHER, "reward__overlong_buffer_tokens": 3}
    succeed(forked_cli([*command, "--replay", str(a / "rollouts"), *overrides(b, **changed, num_steps=2)]))
    rewards = [[step["reward/mean"] for step in records(path)] for path in (a, b)]
    assert rewards[0] != rewards[1], "the rewards are the run's own, not the saved ones"
    for step in records(b):
        length, late, broken = (step[f"rewards/{name}/mean"] for name in TERMS)
        assert broken == 0 and step["reward/failures"] == 8 * 4 and step["reward/timeouts"] == 0
        assert late < 0 and step["reward/mean"] == pytest.approx(length + 0.25 * late)
    assert [step["rollout/staleness_max"] for step in records(b)] == [0, 1]
    first, second = (step["rollout/logprob_abs_diff"] for step in records(b))
    assert first < 1e-3 < second, "the second batch was sampled with older weights"
