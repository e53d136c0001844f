"""Rewards by name. A new one is a file beside this and a line in `REWARDS`; a user's own needs neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.exact import ExactMatchReward
from oblr_megatron.rewards.extract import EXTRACTIONS
from oblr_megatron.rewards.function import WHERE, FunctionReward, check_function
from oblr_megatron.rewards.math import MathReward

if TYPE_CHECKING:
    from oblr_megatron.config import RewardConfig


def _math(extract: Callable[[str], str | None], config: RewardConfig) -> Reward:
    return MathReward(extract, num_workers=config.num_workers, deadline_s=config.timeout_s)


REWARDS: dict[str, Callable[[RewardConfig], Reward]] = {
    "exact_match": lambda _: ExactMatchReward(),
    **{name: partial(_math, extract) for name, extract in EXTRACTIONS.items()},
}


def build_reward(config: RewardConfig) -> Reward:
    """The reward a run asks for; close it, or use it as a context manager.

    Raises:
        UserError: see `check_reward`.
    """
    check_reward(config)
    if make := REWARDS.get(config.name):
        return make(config)
    return FunctionReward(config.name, num_workers=config.num_workers, deadline_s=config.timeout_s)


def check_reward(config: RewardConfig) -> None:
    """Refuse a reward that does not exist, before anything is started.

    Raises:
        UserError: the name is neither known nor that of an importable function of (response, answer, prompt).
    """
    if config.name in REWARDS:
        return
    if ":" not in config.name:
        raise UserError(
            f"unknown reward {config.name!r}",
            where=WHERE,
            mend=f'known: {", ".join(REWARDS)}; your own is "package.module:function"',
        )
    check_function(config.name)


__all__ = ["REWARDS", "Reward", "RewardResult", "build_reward", "check_reward"]
