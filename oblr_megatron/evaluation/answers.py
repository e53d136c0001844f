"""Sample and score the responses to a set, block by block: first greedy, then sampled.

    grades = evaluate("gsm8k", engines, prompts, reward, config)         # collective; same result on every rank
    metrics(grades)                                                      # {"accuracy": 0.81, "mean_at_k": 0.79, ...}

A block has as many responses as a training step, because the engines' deadline is set for that number. Each block has a
fixed seed. So two evaluations of the same prompts differ only by the weights, and an interrupted evaluation continues
with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oblr_megatron.engine.protocol import SamplingRequest, call_seed
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.items import Item, Key, Kind

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.engine.protocol import RolloutEngine
    from oblr_megatron.rewards.base import Reward
    from oblr_megatron.types import Prompt

SEED_OFFSET = 1_000_002  # instead of a step: different from the seeds of a run's first million steps


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts sampled in one request. Example: Block(kind="sampled", first=128, last=256, samples=8)"""

    kind: Kind
    first: int  # position in the set
    last: int  # exclusive
    samples: int  # per prompt

    @property
    def size(self) -> int:
        """Number of responses."""
        return (self.last - self.first) * self.samples

    def keys(self, prompts: Sequence[Prompt]) -> list[Key]:
        """The keys of the block's responses, in order."""
        asked = prompts[self.first : self.last]
        return [(self.kind, prompt.id, sample) for prompt in asked for sample in range(self.samples)]


def block_responses(config: Config) -> int:
    """Responses in a block, as many as in a training step."""
    return config.num_prompts * config.group_size


def blocks_of(config: Config, count: int, kinds: Sequence[Kind] = ("greedy", "sampled")) -> Iterator[Block]:
    """The blocks of `count` prompts: all greedy responses, then all sampled responses."""
    for kind in kinds:
        samples = 1 if kind == "greedy" else config.evaluate.samples_per_prompt
        if samples == 0:
            continue
        step = max(1, block_responses(config) // samples)
        for first in range(0, count, step):
            yield Block(kind, first, min(first + step, count), samples)


def evaluate(
    name: str,
    engines: RolloutEngine,
    prompts: Sequence[Prompt],
    reward: Reward,
    config: Config,
    *,
    done: Sequence[Grade] = (),
    sink: Callable[[Sequence[Item]], None] | None = None,
) -> Grades:
    """Sample and score the responses to a set with the engines' current weights. Collective.

    Args:
        name: of the set.
        engines: collective.
        prompts: [Q], at least one.
        reward: scores the responses.
        config: sampling settings in `evaluate` and `rollout`.
        done: grades of the first blocks, which are not sampled again.
        sink: receives the items of every new block.
    """
    grades = list(done)
    end = 0
    for block in blocks_of(config, len(prompts)):
        end += block.size
        if end <= len(done):
            continue
        items = _items(name, block, engines, prompts, reward, config)
        if sink is not None:
            sink(items)
        grades += [item.grade for item in items]
    return Grades.of(grades, len(prompts), config.evaluate.samples_per_prompt)


def greedy_rewards(engines: RolloutEngine, prompts: Sequence[Prompt], reward: Reward, config: Config) -> list[float]:
    """[Q] main rewards of one greedy response to each prompt. Collective."""
    blocks = blocks_of(config, len(prompts), ("greedy",))
    return [item.verdict for block in blocks for item in _items("", block, engines, prompts, reward, config)]


def _items(
    name: str, block: Block, engines: RolloutEngine, prompts: Sequence[Prompt], reward: Reward, config: Config
) -> list[Item]:
    """Sample and score one block."""
    asked = prompts[block.first : block.last]
    seed = call_seed(config.seed, SEED_OFFSET + block.first)
    request = SamplingRequest.for_evaluation(config, seed, greedy=block.kind == "greedy")
    samples = engines.generate(asked, request)
    result = reward.score(asked, samples)
    answers = result.answers or [None] * len(samples)
    scored = zip(samples, result.main_rewards, result.rewards, answers, strict=True)
    return [
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
        )
        for number, (sample, main, value, answer) in enumerate(scored)
    ]
