r"""The reward "format": 1 if a response has the required format, regardless of its answer, else 0.

By default the response must end by itself (finish_reason "stop") and contain exactly one complete, non-empty
\boxed{...}. With reward.format_pattern the whole response must match that regular expression (a dot also matches a line
break). Matching may take exponential time, so patterns run in worker processes under the deadline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.pool import Pool
from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, pair
from oblr_megatron.rewards.verifier.extract import boxed, complete_boxes
from oblr_megatron.types import Prompt, Sample


def keeps_to_box(sample: Sample) -> bool:
    r"""The default format. "so \boxed{4}." is True; "\boxed{3} or \boxed{4}", "\boxed{}", truncated texts are False."""
    one = len(list(complete_boxes(sample.text))) == 1
    return sample.finish_reason == "stop" and one and boxed(sample.text) is not None


class PatternFormatReward(PooledReward):
    """The whole response matches a pattern."""

    def __init__(self, config: RewardConfig) -> None:
        """reward.format_pattern must pass `check_pattern`."""
        super().__init__(Pool(f"{__name__}:matches", num_workers=config.num_workers, deadline_s=config.timeout_s))
        self._pattern = config.format_pattern

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; see `Reward.score`."""
        return collect(self.pool.map([(self._pattern, sample.text) for _, sample in pair(prompts, samples)]))


def matches(pattern: str, text: str) -> float:
    """Runs in the worker processes; `re` caches the compiled pattern there."""
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def check_pattern(pattern: str) -> None:
    """Check reward.format_pattern.

    Raises:
        UserError: the pattern does not compile.
    """
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{pattern!r} is not a regular expression: {error}",
            where="config: reward.format_pattern",
            fix="use the syntax of Python's re",
        ) from error
