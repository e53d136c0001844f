r"""The reward "format": 1 if a response keeps to the format, whether its answer is right or not, else 0.

By default a response ends by itself (finish_reason "stop") and states exactly one answer, in a complete \boxed{...}
that is not empty. With reward.format_pattern the whole response has to match that regular expression, in which a dot
stands for a line break, too. A pattern can take for ever on a text that nobody foresaw, so that it is tried in worker
processes under the deadline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import PooledReward, Reward, RewardResult, collect, pair
from oblr_megatron.rewards.verifier.extract import boxed, complete_boxes
from oblr_megatron.rewards.workers.pool import Pool
from oblr_megatron.types import Prompt, Sample


class BoxFormatReward(Reward):
    """Exactly one complete box; judged on the spot, by a linear scan."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        return RewardResult([float(keeps_to_box(sample)) for _, sample in pair(prompts, samples)])


def keeps_to_box(sample: Sample) -> bool:
    r"""Examples: "so \boxed{4}." is True; "\boxed{3} or \boxed{4}", "\boxed{}" and what was cut are False."""
    one = len(list(complete_boxes(sample.text))) == 1
    return sample.finish_reason == "stop" and one and boxed(sample.text) is not None


class PatternFormatReward(PooledReward):
    """The whole response matches a pattern."""

    def __init__(self, pattern: str, *, num_workers: int, deadline_s: float) -> None:
        """`pattern` was found to compile."""
        super().__init__(Pool(f"{__name__}:matches", num_workers=num_workers, deadline_s=deadline_s))
        self._pattern = pattern

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        return collect(self.pool.map([(self._pattern, sample.text) for _, sample in pair(prompts, samples)]))


def matches(pattern: str, text: str) -> float:
    """Called in the workers, which `re` keeps the compiled pattern in."""
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def check_pattern(pattern: str) -> None:
    """Refuse what is no regular expression.

    Raises:
        UserError: with the place in the pattern.
    """
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{pattern!r} is not a regular expression: {error}",
            where="config: reward.format_pattern",
            fix="write it as Python's re does",
        ) from error
