"""The figures of an evaluation, and how responses are asked for and judged.

pass@k is compared with the average over all subsets, the Wilson interval with its definition. Not covered: real engines
(tests/e2e); the one here replays a fixed table of responses, and the reward is the real one.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oblr_megatron.config import Config, parse_config
from oblr_megatron.evaluate import evaluate, figures, majority_at_k, pass_at_k, wilson_interval
from oblr_megatron.rewards.exact import ExactMatchReward
from oblr_megatron.types import Prompt, Sample


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_average_over_all_subsets(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    verdicts = [True] * right + [False] * (samples - right)
    subsets = list(itertools.combinations(verdicts, k))
    assert pass_at_k(right, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01, rel=1e-9)
    assert pass_at_k(10_000, 10_000, 3) == 1
    with pytest.raises(AssertionError):
        pass_at_k(1, 4, 5)


@pytest.mark.parametrize(
    ("answers", "gold", "expected"),
    [
        (["4", "5", "4"], "4", True),
        (["4", "5", "5"], "4", False),
        (["4", "5"], "4", True),
        (["5", "4"], "4", False),
        ([None, None, "4"], "4", True),
        ([None, None], "4", False),
        ([], "4", False),
    ],
)
def test_majority(answers: Sequence[str | None], gold: str, expected: bool) -> None:
    assert majority_at_k(answers, gold) is expected


@given(st.integers(1, 500), st.data())
def test_wilson_interval_solves_its_equation(count: int, data: st.DataObject) -> None:
    """At either end the observed share is z standard errors away; the ends stay inside [0, 1]."""
    right = data.draw(st.integers(0, count))
    low, high = wilson_interval(right, count)
    assert 0 <= low <= right / count <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(right / count - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), abs=1e-9)


def test_wilson_interval_of_nothing() -> None:
    assert wilson_interval(0, 0) == (0, 1)
    assert wilson_interval(8, 10) == pytest.approx((0.490, 0.943), abs=5e-4)


def test_figures_by_hand() -> None:
    sampled = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0, 0]]
    assert figures([1, 0, 1, 0.9], sampled) == {
        "accuracy": 0.5,
        "mean_at_k": (0.25 + 0 + 1 + 0.25) / 4,
        "pass_at_k": 0.5,
    }


class Replay:
    """Answers by table: prompt -> (greedy, sampled); keeps what it was asked."""

    def __init__(self, table: dict[str, tuple[str, list[str]]]) -> None:
        self.table, self.calls = table, []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, greedy: bool = False, **rest: Any
    ) -> list[Sample]:
        self.calls.append({"ids": [prompt.id for prompt in prompts], "k": group_size, "greedy": greedy, **rest})
        samples = []
        for group, prompt in enumerate(prompts):
            texts = [self.table[prompt.id][0]] if greedy else self.table[prompt.id][1][:group_size]
            samples += [Sample(group, prompt.token_ids, (1,), (0.0,), text, "stop", 0) for text in texts]
        return samples


def config(**values: object) -> Config:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    return parse_config({"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t"}}, "test", overrides)


def test_evaluate_judges_greedy_and_sampled_responses() -> None:
    table = {"a": ("1", ["1", "2"]), "b": ("9", ["8", "7"]), "c": ("3", ["4", "3"])}
    prompts = [Prompt(n, name, name, (n,), str(n + 1), "t") for n, name in enumerate("abc")]
    engine = Replay(table)
    settings = config(
        evaluate__samples_per_prompt=2,
        evaluate__temperature=0.6,
        rollout__max_response_tokens=77,
        num_prompts=2,
        group_size=2,
        algo__snr__num_folds=1,
        seed=5,
    )
    result = evaluate("set/one", engine, prompts, ExactMatchReward(), settings)  # type: ignore[arg-type]
    assert result == {
        "eval/set/one/accuracy": pytest.approx(2 / 3),
        "eval/set/one/mean_at_k": pytest.approx(1 / 3),
        "eval/set/one/pass_at_k": pytest.approx(2 / 3),
    }
    assert [(call["ids"], call["k"], call["greedy"]) for call in engine.calls] == [
        (["a", "b", "c"], 1, True),
        (["a", "b"], 2, False),
        (["c"], 2, False),
    ], "no call asks for more responses than a training step does"
    assert {call["max_tokens"] for call in engine.calls} == {77}
    assert {call["temperature"] for call in engine.calls} == {0.6}
    assert engine.calls[1]["seed"] != engine.calls[2]["seed"]
    first = [call["seed"] for call in engine.calls]
    evaluate("set/one", engine, prompts, ExactMatchReward(), settings)  # type: ignore[arg-type]
    assert [call["seed"] for call in engine.calls[3:]] == first, "two evaluations differ by the weights alone"
    training_seeds = {settings.seed * 1_000_003 + step for step in range(settings.num_steps)}
    assert training_seeds.isdisjoint(first)


def test_the_module_needs_no_torch() -> None:
    script = "import sys, oblr_megatron.evaluate; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).resolve().parents[2])
