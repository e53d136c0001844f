"""Which weights made a sample, and whether they are recent enough to train from it. Pure.

Version v are the weights after v optimizer steps. A sample of version v that meets a trainer at version V is V - v
updates old; 0 is on-policy, and the importance ratios of `algo/importance.py` stand in for what an older one is off by. A
sample of a version that the trainer has not reached belongs to another run, or to an engine out of step with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from oblr_megatron.errors import RunError

if TYPE_CHECKING:
    from oblr_megatron.types import Sample


class StaleSampleError(RunError):
    """A sample was made by weights too far from the trainer's."""


def staleness(versions: Iterable[int], current: int, limit: int) -> int:
    """Updates by which the oldest of some samples is behind the trainer; 0 without samples.

    Args:
        versions: of the weights that made them.
        current: version of the trainer's weights.
        limit: rollout.max_staleness.

    Raises:
        StaleSampleError: one is older than the limit, or newer than the trainer.

    Example: staleness([5, 4], current=5, limit=1) is 1; with limit=0 it raises.
    """
    known = set(versions)
    oldest, newest = min(known, default=current), max(known, default=current)
    if newest > current:
        raise StaleSampleError(f"a sample was made by weights {newest}, but the trainer is at version {current}")
    if current - oldest > limit:
        raise StaleSampleError(
            f"a sample was made by weights {oldest}, {current - oldest} updates before the trainer's version "
            f"{current}; rollout.max_staleness is {limit}"
        )
    return current - oldest


def check_batch(samples: Sequence[Sample], count: int, version: int) -> None:
    """Refuse what engines returned unless it is all that was asked for, of the weights that were pushed last.

    Args:
        samples: of all engines.
        count: of samples that were asked for.
        version: that every engine serves.

    Raises:
        RunError: samples are missing, too many, or of other weights.
    """
    stale = {sample.version for sample in samples} - {version}
    if stale or len(samples) != count:
        raise RunError(
            f"the engines returned {len(samples)} samples for {count}, of weights {sorted(stale) or version} beside "
            f"version {version}"
        )
