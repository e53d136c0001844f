"""What earlier steps tell about the prompts of a step, as the baselines read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """What earlier steps tell about Q prompts.

    Example: History(expected=tensor([0.31, nan]), pull=0.9)
    """

    expected: Tensor | None = None  # b_t [Q] fp64; NaN where no earlier step tells anything; None: for no prompt
    pull: float = 0.0  # alpha of `optimal_pooled`
    by_position: Tensor | None = None  # b [Q, B] fp64 by bin of positions (token_pools.py); NaN and None as above


NO_HISTORY = History()
