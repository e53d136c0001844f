"""Sampling and scoring block by block.

The engine replays a fixed table of responses; the rewards are real. Not covered: real engines (tests/e2e).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.config import Config, parse_config
from oblr_megatron.engine.protocol import SamplingRequest, call_seed
from oblr_megatron.evaluation.accuracy import metrics
from oblr_megatron.evaluation.answers import blocks_of, evaluate
from oblr_megatron.evaluation.items import Item, Sink
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.registry import ExactMatchReward
from oblr_megatron.types import Prompt, Sample

TABLE = {"a": ("1", ["1", "2"]), "b": ("9", ["8", "7"]), "c": ("3", ["4", "3"])}
PROMPTS = [Prompt(n, name, f"say {name}", (n,), str(n + 1), "t") for n, name in enumerate("abc")]
SMALL = {"num_prompts": 2, "group_size": 2, "algo.snr.num_folds": 1, "evaluate.samples_per_prompt": 2, "seed": 5}


class Replay:
    """Responds by table: prompt -> (greedy, sampled); records the requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], SamplingRequest]] = []

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        self.calls.append(([prompt.id for prompt in prompts], request))
        samples = []
        for group, prompt in enumerate(prompts):
            greedy, sampled = TABLE[prompt.id]
            texts = [greedy] if request.greedy else sampled[: request.group_size]
            samples += [Sample(group, prompt.token_ids, (1,), (0.0,), text, "stop", 0) for text in texts]
        return samples


class Sum(Reward):
    """Exact match plus half a point for every response; the answer is the whole text."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        main = ExactMatchReward().score(prompts, samples).rewards
        terms = {"main": main, "more": [0.5] * len(main)}
        answers: list[str | None] = [sample.text for sample in samples]
        return RewardResult([r + 0.5 for r in main], answers=answers, terms=terms, by_value=True)


def config(**values: object) -> Config:
    overrides = [f"{key}={value}" for key, value in {**SMALL, **values}.items()]
    return parse_config({"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t"}}, "test", overrides)


def into(items: list[Item]) -> Sink:
    """A sink that appends to a list."""
    return lambda first, block: items.extend(block)


def run(settings: Config, reward: Reward, **options: Any) -> tuple[Replay, dict[str, float]]:
    engine = Replay()
    return engine, metrics(evaluate("s", engine, PROMPTS, reward, settings, **options))  # type: ignore[arg-type]


def test_greedy_and_sampled_responses_are_scored() -> None:
    _, found = run(config(), ExactMatchReward())
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["mean_at_k"] == pytest.approx(1 / 3)
    assert found["pass_at_k"] == pytest.approx(2 / 3)


def test_accuracies_use_only_the_main_reward() -> None:
    items: list[Item] = []
    _, found = run(config(), Sum(), sink=into(items))
    assert found["accuracy"] == pytest.approx(2 / 3) and found["mean_at_k"] == pytest.approx(1 / 3)
    assert found["maj_at_k"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert [(item.verdict, item.reward) for item in items[:2]] == [(1.0, 1.5), (0.0, 0.5)]
    assert [item.verdict for item in items[:3]] == [1.0, 0.0, 1.0]
    assert all(item.grade.by_value for item in items)


def test_no_request_is_larger_than_a_training_step() -> None:
    engine, _ = run(config(), ExactMatchReward())
    asked = [(ids, request.group_size, request.greedy) for ids, request in engine.calls]
    assert asked == [(["a", "b", "c"], 1, True), (["a", "b"], 2, False), (["c"], 2, False)]
    blocks = blocks_of(config(**{"evaluate.samples_per_prompt": 9}), 2)
    assert [(block.last - block.first) * block.samples for block in blocks] == [2, 9, 9]


def test_requests_use_the_evaluation_settings_and_other_seeds_than_training() -> None:
    options = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "max_response_tokens": 77}
    settings = config(**{f"evaluate.{name}": value for name, value in options.items()})
    engine, _ = run(settings, ExactMatchReward())
    (_, greedy), (_, first), (_, second) = engine.calls
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.max_tokens) == (0, 1, -1, 77)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.6, 0.9, 7, 77)
    assert first.seed != second.seed
    assert run(settings, ExactMatchReward())[0].calls == engine.calls, "two evaluations differ only by the weights"
    training = {call_seed(settings.seed, step) for step in range(settings.num_steps)}
    assert training.isdisjoint({request.seed for _, request in engine.calls})


def test_the_default_response_length_is_that_of_training() -> None:
    settings = config(**{"rollout.max_response_tokens": 50, "data.max_prompt_tokens": 10})
    assert run(settings, ExactMatchReward())[0].calls[0][1].max_tokens == 50
    assert max_model_len(settings) == 60
    assert max_model_len(config(**{"data.max_prompt_tokens": 10, "evaluate.max_response_tokens": 700})) == 710


def test_without_samples_only_greedy_responses_are_requested() -> None:
    engine, found = run(config(**{"evaluate.samples_per_prompt": 0}), ExactMatchReward())
    assert len(engine.calls) == 1 and "mean_at_k" not in found


def test_the_fields_of_an_item() -> None:
    items: list[Item] = []
    run(config(), Sum(), sink=into(items))
    assert items[4] == Item(
        "s", "a", 0, "say a", "1", "sampled", 1, "2", 0.0, 0.5, 1, "stop", answer="2", by_value=True
    )
