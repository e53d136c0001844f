"""The age of samples, and its limit.

Version v names the weights after v steps of the run. If the trainer is at version V, a sample of version v is V - v
steps old. Age 0 is on-policy; the importance weights of `algo/importance.py` correct older samples. A version above V
belongs to another run, or to an engine that is out of step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oblr_megatron.errors import BrokenStepError
from oblr_megatron.types import Sample


class StaleSampleError(BrokenStepError):
    """A sample is too old, or newer than the trainer's weights."""


def staleness(versions: Iterable[int], current: int, limit: int) -> int:
    """Age in updates of the oldest sample; 0 without samples.

    Raises:
        StaleSampleError: a sample is older than the limit, or newer than the trainer.

    Example: staleness([5, 4], current=5, limit=1) is 1; with limit=0 it raises.
    """
    known = set(versions)
    oldest, newest = min(known, default=current), max(known, default=current)
    if newest > current:
        raise StaleSampleError(f"a sample has version {newest}, but the trainer is at version {current}")
    if current - oldest > limit:
        raise StaleSampleError(
            f"a sample has version {oldest}, {current - oldest} updates before the trainer's version {current}; "
            f"rollout.max_staleness is {limit}"
        )
    return current - oldest


def check_batch(samples: Sequence[Sample], count: int, version: int) -> None:
    """Refuse (BrokenStepError) another number of samples than `count`, and samples of another version."""
    stale = {sample.version for sample in samples} - {version}
    if stale or len(samples) != count:
        raise BrokenStepError(
            f"the engines returned {len(samples)} samples instead of {count}, of versions {sorted(stale) or version} "
            f"instead of {version}"
        )
