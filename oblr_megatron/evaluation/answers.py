"""Sample and score the responses to a set, block by block: first greedy, then sampled.

    grades = evaluate("gsm8k", engines, prompts, reward, config)         # collective; same result on every rank
    metrics(grades)                                                      # {"accuracy": 0.81, "mean_at_k": 0.79, ...}

A block has as many responses as a training step, because the engines' deadline is set for that number. Each block has a
fixed seed. So two evaluations of the same prompts differ only by the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oblr_megatron.engine.protocol import SamplingRequest, call_seed
from oblr_megatron.errors import RunError
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.items import Item, Kind, Sink
from oblr_megatron.rewards.base import cause_of

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.engine.protocol import Sampler
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.types import Prompt

SEED_OFFSET = 1_000_002  # instead of a step: different from the seeds of a run's first million steps


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts sampled in one request.

    Example, of 500 prompts: Block(start=1524, kind="sampled", first=128, last=256, samples=8)
    """

    start: int  # position of its first response among those of the set
    kind: Kind
    first: int  # position in the set
    last: int  # exclusive
    samples: int  # per prompt


def block_responses(config: Config) -> int:
    """Responses in a block, as many as in a training step."""
    return config.num_prompts * config.group_size


def blocks_of(config: Config, count: int) -> Iterator[Block]:
    """The blocks of `count` prompts: all greedy responses, then all sampled responses."""
    kinds: list[tuple[Kind, int, int]] = [("greedy", 0, 1), ("sampled", count, config.evaluate.samples_per_prompt)]
    for kind, start, samples in kinds:
        if samples == 0:
            continue
        step = max(1, block_responses(config) // samples)
        for first in range(0, count, step):
            yield Block(start + first * samples, kind, first, min(first + step, count), samples)


def evaluate(
    name: str,
    engines: Sampler,
    prompts: Sequence[Prompt],
    reward: Reward,
    config: Config,
    *,
    sink: Sink | None = None,
    strict: bool = False,
) -> Grades:
    """Sample and score the responses to a set with the engines' current weights. Collective.

    Args:
        name: of the set.
        engines: collective.
        prompts: [Q], at least one.
        reward: scores the responses.
        config: sampling settings in `evaluate` and `rollout`.
        sink: receives the items of every block that is sampled.
        strict: raise after as many unscored responses in a row as a block has, before the sink receives the last ones.

    Raises:
        RunError: `strict`, and the reward failed for that many responses in a row; the same on every rank.
    """
    grades, fault = list[Grade](), ""
    for block in blocks_of(config, len(prompts)):
        items, cause = _items(name, block, engines, prompts, reward, config)
        grades += [item.grade for item in items]
        recent = grades[-block_responses(config) :]  # as many as a full block has, because the last one may be short
        if strict and not any(grade.scored for grade in recent):
            raise RunError(f"set {name!r}: the reward failed for the last {len(recent)} responses: {cause}")
        if sink is not None:
            sink(block.start, items)
        fault = fault or cause
    return Grades(grades[: len(prompts)], grades[len(prompts) :], config.evaluate.samples_per_prompt, fault)


def _items(
    name: str, block: Block, engines: Sampler, prompts: Sequence[Prompt], reward: Reward, config: Config
) -> tuple[list[Item], str]:
    """Sample and score one block. The text says why responses are unscored; it is empty if all are scored."""
    asked = prompts[block.first : block.last]
    seed = call_seed(config.seed, SEED_OFFSET + block.first)
    request = SamplingRequest.for_evaluation(config, seed, greedy=block.kind == "greedy")
    samples = engines.generate(asked, request)
    result = reward.score(asked, samples)
    answers, unscored = result.answers or [None] * len(samples), result.unscored
    scored = zip(samples, result.main_rewards, result.rewards, answers, strict=True)
    items = [
        Item(
            set=name,
            id=(prompt := asked[number // block.samples]).id,
            row=prompt.row,
            prompt=prompt.text,
            gold=prompt.answer,
            kind=block.kind,
            sample=number % block.samples,
            response=sample.text,
            verdict=main,
            reward=value,
            tokens=sample.length,
            finish_reason=sample.finish_reason,
            answer=answer,
            reads_answers=result.answers is not None,
            scored=number not in unscored,
            by_value=result.by_value,
        )
        for number, (sample, main, value, answer) in enumerate(scored)
    ]
    return items, cause_of([result], config.reward) if unscored else ""
