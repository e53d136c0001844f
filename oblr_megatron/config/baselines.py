"""Facts about every baseline, read by config checks, the memory model and the algorithm. Imports no torch.

To add a baseline to the package, add its name and facts to BASELINES and its formula to `algo/formulas.py`. To remove
one, delete both. A user's own needs neither: its function declares the facts, and `algo.baseline` names it.

    from oblr_megatron import baseline

    @baseline(over="others")
    def median(rewards, norms_sq, lengths, history): ...    # algo.baseline = "my_baselines:median"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from oblr_megatron.errors import UserError
from oblr_megatron.user_functions import import_from_here

if TYPE_CHECKING:
    from torch import Tensor

Over = Literal["nothing", "others", "group", "batch"]
Pool = Literal["", "plain", "norms"]
Divisor = Literal["one", "group_std", "batch_std", "centred_std"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Baseline:
    """Inputs of a baseline b_i and its use in the advantage A_i = (r_i - b_i) / divisor."""

    over: Over
    """The responses of its own step that b_i averages. "others" leaves response i out, which keeps g unbiased."""
    needs_norms: bool = False
    """Whether b_i reads the squared gradient norms w of its own prompt, so that they come before the gradient."""
    pool: Pool = ""
    """Weights of the rewards of earlier steps that b_i averages: all equal, or w; "": none are read."""
    prior: bool = False
    """Whether a part of b_i comes from the other prompts of the batch, so that it needs two prompts."""
    divisor: Divisor = "one"
    """Divisor of A: 1, the standard deviation of rewards of the group or batch, or of r - b over the batch."""

    @property
    def needs_group(self) -> bool:
        """Whether G = 1 makes no sense: b_i has no other response, or is r_i itself, or one reward has no deviation."""
        return self.over in ("others", "group") or self.divisor == "group_std"

    @property
    def pools_norms(self) -> bool:
        """Whether w weighs its pool of earlier rewards."""
        return self.pool not in ("", "plain")

    @property
    def zero_on_equal(self) -> bool:
        """Whether A is exactly 0 in a group of equal rewards, so that its passes may be skipped."""
        return self.over in ("others", "group") and not (self.prior or self.pool)


BASELINES: dict[str, Baseline] = {
    "none": Baseline("nothing"),
    "group_mean": Baseline("group"),
    "grpo": Baseline("group", divisor="group_std"),
    "batch_mean": Baseline("batch"),
    "reinforce_pp": Baseline("batch", divisor="batch_std"),
    "rloo": Baseline("others"),
    "opo": Baseline("group"),
    "optimal": Baseline("others", needs_norms=True),
    "pooled_mean": Baseline("nothing", pool="plain"),
    "pooled": Baseline("nothing", pool="norms"),
    "optimal_pooled": Baseline("others", needs_norms=True, pool="norms"),
}
"""The facts of each baseline of the package by name."""


class UserBaseline(Protocol):
    """A user's function with its facts."""

    facts: Baseline

    def __call__(self, rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: Any, /) -> Tensor:
        """b [Q, G] fp64 from rewards, w and response tokens, all [Q, G] fp64, and `algo.formulas.History`."""


def baseline(
    over: Over,
    *,
    needs_norms: bool = False,
    pool: Pool = "",
    prior: bool = False,
    divisor: Divisor = "one",
) -> Callable[[Function], Function]:
    """Declare what a user's baseline reads. The arguments are the fields of `Baseline`; a run checks them at its start.

    Example:
        @baseline(over="others")
        def rloo(rewards, norms_sq, lengths, history):
            return (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)

    Raises:
        UserError: a value is unknown, or two facts contradict each other.
    """
    where = "facts of a baseline"
    for name, value, kind in (("over", over, Over), ("pool", pool, Pool), ("divisor", divisor, Divisor)):
        if value not in get_args(kind):
            names = ", ".join(map(repr, get_args(kind)))
            raise UserError(f"{name} {value!r} is unknown", where=where, fix=f"use one of {names}")
    if needs_norms and over not in ("others", "group"):
        what = f"needs_norms=True with over={over!r}: norms are known for one prompt at a time"
        raise UserError(what, where=where, fix='use over="others" or over="group", or leave needs_norms out')
    facts = Baseline(over, needs_norms, pool, prior, divisor)

    def declared(function: Function) -> Function:
        function.facts = facts  # type: ignore[attr-defined]
        return function

    return declared


def user_baseline(name: str) -> UserBaseline:
    """The user's function "package.module:function" or "path/to/file.py:function".

    Raises:
        UserError: it cannot be imported, is not callable, or declares no facts.
    """
    where = "algo.baseline"
    imported: Any = import_from_here(name, f"baseline {name!r}", where)
    if not isinstance(getattr(imported, "facts", None), Baseline):
        what = f"baseline {name!r} does not declare what it reads"
        fix = 'decorate the function, e.g. with @oblr_megatron.baseline(over="others")'
        raise UserError(what, where=where, fix=fix)
    function: UserBaseline = imported
    return function


def facts_of(name: str) -> Baseline:
    """The facts of a baseline of the package, or of a user's function.

    Raises:
        UserError: see `user_baseline`.
    """
    return BASELINES[name] if name in BASELINES else user_baseline(name).facts
