"""Whole runs with an environment that raises, hangs and blocks for some prompts: two ranks, replay, resume, evaluation.

Real vLLM. Not covered: learning (examples/tools_cpu and examples/guess_cpu show it), servers.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from oblr_megatron.checkpoint.store import checkpoints_of, read_manifest
from oblr_megatron.rollout.step_file import read_step, step_path
from tests.distributed.replayed import certain
from tests.e2e.conftest import records
from tests.e2e.forked import CONFIG, call_forked, forked, forked_and_signalled, forked_cli, run_script
from tests.e2e.test_replay import same_metrics, same_weights

Overrides = Callable[..., list[str]]
FUNCTION = "tests.e2e.environments:second_thoughts"
OPTIONS = f'{{function = "{FUNCTION}", deadline_s = 8.0, in_rounds = true}}'
CALL = re.compile(r'"expression": "(\d+)\*(\d+)"')
RESULT = re.compile(r"<tool_response>\n(\d+)\n</tool_response>")
RUN = {
    "rollout__environment": OPTIONS,
    "rollout__max_response_tokens": 10,
    "reward__name": "environment",
    "num_prompts": 16,
    "group_size": 2,
    "data__shuffle": "false",
}


def test_two_ranks_and_their_replay(tmp_path: Path, overrides: Overrides) -> None:
    """Under a filter, with centering: turns hold the tokens that their draws could take."""
    a, b = tmp_path / "a", tmp_path / "b"
    options = RUN | {"num_steps": 2, "rollout__num_engines": 2, "rollout__top_k": 8, "algo__center": "true"}
    result = forked(2, [*overrides(a, **options), "--save-rollouts"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "out of order" in result.stderr, "the first failure of an engine's episodes is shown"
    steps = records(a)[-2:]
    assert sum(step["environment/failures"] for step in steps) > 0
    assert sum(step["environment/timeouts"] for step in steps) > 0
    for number, step in enumerate(steps, start=1):
        saved = read_step(step_path(a / "rollouts", number))
        for sample, reward in zip(saved.samples, saved.rewards, strict=True):
            row = saved.prompts[sample.group].row
            expected = "failed" if row % 9 == 0 else "late" if row % 31 in (20, 21) else None
            assert (sample.finish_reason == expected) if expected else sample.finish_reason in ("stop", "length")
            assert sample.environment_reward == (None if expected else reward)
            assert expected or (sample.turns == 2 and sample.mask.count(False) == 1)
        failed = sum(sample.finish_reason in ("failed", "late") for sample in saved.samples)
        assert step["environment/failures"] + step["environment/timeouts"] == step["reward/failures"] == failed
        lengths = [sample.length for sample in saved.samples]
        assert step["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert step["environment/turns_mean"] == pytest.approx(2 * (1 - failed / len(lengths)))
        assert step["rollout/logprob_abs_diff"] < 1e-4, "the trainer agrees with the engine on every turn"
    assert any(step["grad_norm"] > 0 for step in steps)
    result = forked(2, [*overrides(b, **options), "--replay", str(a / "rollouts")])
    assert result.returncode == 0, result.stderr[-3000:]
    same_metrics(a, b)
    same_weights(a, b)


@pytest.mark.nightly
def test_stopped_and_resumed_is_unbroken(tmp_path: Path, overrides: Overrides) -> None:
    """With in_rounds, to the bit; also the evaluations, which use the same environment."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = RUN | {"num_steps": 3, "evaluate__every_steps": 3, "evaluate__num_prompts": 12}
    unbroken = forked(1, overrides(whole, **options))
    assert unbroken.returncode == 0, unbroken.stderr[-2000:]
    keys = overrides(parts, **options)
    done = forked_and_signalled(2, parts / "metrics.jsonl", signal.SIGUSR1, ["train", CONFIG, *keys])
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1 <= read_manifest(checkpoints_of(parts)[0]).step < 3
    resumed = forked(1, [*keys, "--resume"])
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert certain(parts) == certain(whole) and len(certain(whole)) == 4
    items = [json.loads(line) for line in (whole / "evaluations/step_000003/heldout.jsonl").read_text().splitlines()]
    assert {item["finish_reason"] for item in items} >= {"failed"} and max(item["tokens"] for item in items) > 4
    assert all(item["reward"] == 0 for item in items if item["finish_reason"] == "failed")


@pytest.mark.parametrize("overlap", ["stream", "one_step"])
def test_episodes_overlap_with_training(tmp_path: Path, overrides: Overrides, overlap: str) -> None:
    """Finished prompts are trained on while episodes of others go on; or the next step's episodes run meanwhile."""
    staleness = int(overlap == "one_step")
    options = RUN | {"num_steps": 2, "rollout__overlap": overlap, "rollout__max_staleness": staleness}
    free = OPTIONS.replace("in_rounds = true", "in_rounds = false")
    options |= {"rollout__environment": free, "algo__baseline": "rloo", "rollout__wave_tokens": 1}
    result = forked(1, overrides(tmp_path / "run", **options))
    assert result.returncode == 0, result.stderr[-3000:]
    steps = records(tmp_path / "run")[-2:]
    assert sum(step["environment/failures"] + step["environment/timeouts"] for step in steps) > 0
    assert all(1 < step["environment/turns_mean"] < 2 and step["grad_norm"] > 0 for step in steps)
    assert steps[-1]["rollout/staleness_max"] == staleness
    assert overlap == "one_step" or min(step["rollout/waves"] for step in steps) >= 1


@pytest.mark.nightly
def test_the_tool_loop_after_a_short_warm_start(tmp_path: Path) -> None:
    """The model calls the calculator in many episodes, and the tool's result comes between its turns."""
    prepared = call_forked(
        run_script, 1, ["examples/tools_cpu/prepare.py", "--out", str(tmp_path), "--steps", "120"], {}
    )
    assert prepared.returncode == 0, prepared.stderr[-2000:]
    keys = {
        "run_dir": tmp_path / "run",
        "model.path": tmp_path / "model",
        "data.train": tmp_path / "train.jsonl",
        "evaluate.data.heldout": tmp_path / "heldout.jsonl",
        "evaluate.every_steps": 0,
        "num_steps": 2,
        "num_prompts": 16,
    }
    arguments = ["train", "examples/tools_cpu/config.toml", *(f"{key}={value}" for key, value in keys.items())]
    result = forked_cli([*arguments, "--save-rollouts"])
    assert result.returncode == 0, result.stderr[-3000:]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    samples = [s for n in (1, 2) for s in read_step(step_path(tmp_path / "run" / "rollouts", n)).samples]
    calls = [sample for sample in samples if sample.turns > 1]
    assert len(calls) > len(samples) / 4
    for sample in calls:
        written, seen = "", ""
        for token, own in zip(sample.response_ids, sample.mask, strict=True):
            text = tokenizer.decode([token])
            written, seen = (written + text, seen) if own else (written, seen + text)
        assert seen.startswith("\n<|im_start|>user\n<tool_response>\n")
        if asked := CALL.search(written):
            result_of = RESULT.search(seen)
            assert result_of is not None and int(asked[1]) * int(asked[2]) == int(result_of[1])
    assert sum(CALL.search(tokenizer.decode(list(sample.response_ids))) is not None for sample in calls) > 5
