"""Rewards by name, alone or in a weighted sum (combined.py).

To add a reward to the package, write a class and add a line to `REWARDS`. A user's function or service needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from oblr_megatron.config.reward import RewardConfig, RewardTermConfig
from oblr_megatron.errors import UserError
from oblr_megatron.extension import extension
from oblr_megatron.rewards.base import Fault, Reward, RewardResult, SampleReward, pair
from oblr_megatron.rewards.combined import CombinedReward, Term
from oblr_megatron.rewards.format import PatternFormatReward, check_pattern, keeps_to_box
from oblr_megatron.rewards.function import FunctionReward, check_function
from oblr_megatron.rewards.http import HttpReward, bearer_key, check_address, check_service, is_url
from oblr_megatron.rewards.math import MathReward
from oblr_megatron.rewards.overlong import check_overlong, punishment
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.types import Prompt, Sample

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.config.data import DataConfig, SourceConfig


class ExactMatchReward(Reward):
    """1 if the response equals the gold answer after trimming and collapsing white space."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """Rewards in {0, 1}; the answers are the whole responses. See `Reward.score`."""
        pairs = [(one_line(sample.text), one_line(prompt.answer)) for prompt, sample in pair(prompts, samples)]
        return RewardResult([float(own == gold) for own, gold in pairs], answers=[own or None for own, _ in pairs])


def one_line(text: str) -> str:
    r"""Trim, and collapse runs of white space to one space. Example: " 4\n2 " -> "4 2"."""
    return " ".join(text.split())


class EnvironmentReward(Reward):
    """Reads `Sample.environment_reward` (docs/environments.md).

    0 for an episode that reached a limit before it gave one.
    """

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        faults: dict[int, Fault] = {
            place: "failed"
            for place, sample in enumerate(samples)
            if sample.finish_reason == "stop" and sample.environment_reward is None
        }
        return RewardResult(
            [sample.environment_reward or 0.0 for sample in samples],
            faults=faults,
            error="the environment returned no reward" if faults else None,
        )


GYM = "reward reasoning_gym"
GYM_REWARDS = ("reasoning_gym", "reasoning_gym:whole")
Make = Callable[[RewardConfig, int], Reward]  # from the section [reward] and rollout.max_response_tokens


def _by_answer(extract: Callable[[str], str | None]) -> Make:
    return lambda config, tokens: MathReward(extract, num_workers=config.num_workers, deadline_s=config.timeout_s)


def _by_task(name: str) -> Make:
    return lambda config, tokens: extension(GYM).GymReward(name, config)


REWARDS: dict[str, Make] = {
    "exact_match": lambda config, tokens: ExactMatchReward(),
    **{name: _by_answer(extract) for name, extract in EXTRACTIONS.items()},
    **{name: _by_task(name) for name in GYM_REWARDS},
    "format": lambda config, _: PatternFormatReward(config) if config.format_pattern else SampleReward(keeps_to_box),
    "environment": lambda config, tokens: EnvironmentReward(),
    "overlong": lambda config, tokens: SampleReward(
        lambda sample: punishment(len(sample.response_ids), tokens, config.overlong_buffer_tokens)
    ),
}


def build_reward(config: RewardConfig, *, max_response_tokens: int) -> Reward:
    """The configured reward, which has passed `check_reward`. Close it, or use it as a context manager.

    Args:
        config: the section `reward`.
        max_response_tokens: from the section `rollout`.
    """
    if not config.terms and config.weight == 1.0:
        return _build(config.name, config, max_response_tokens)

    def term(asked: RewardTermConfig) -> Term:
        return Term(asked.name, asked.weight, _build(asked.name, config, max_response_tokens))

    main = RewardTermConfig(name=config.name, weight=config.weight)
    return CombinedReward([term(asked) for asked in (main, *config.terms)])


def check_reward(config: RewardConfig, *, max_response_tokens: int, reach: bool = True) -> None:
    """Check the section `reward` before the run starts; with `reach`, connect to its services.

    Raises:
        UserError: a name is duplicate, unknown, or names a function or service that cannot be used; or an option of
            a named reward is missing or wrong.
    """
    for place, name in enumerate(config.names):
        if name in config.names[:place]:
            raise UserError(
                f"the reward {name!r} is listed twice",
                where="config: reward.terms",
                fix="list it once, with the sum of the weights",
            )
    for place, name in enumerate(config.names):
        _check(name, config, max_response_tokens, where=_where(place))
    if reach:
        check_services(config)


def check_services(config: RewardConfig) -> None:
    """Connect once to each service among the rewards.

    Raises:
        UserError: nothing listens there, or its key is not set.
    """
    for place, name in enumerate(config.names):
        if is_url(name):
            bearer_key(config.api_key_env)
            check_service(name, _where(place))


def _where(place: int) -> str:
    return f"config: reward.{'terms' if place else 'name'}"


def check_rows(config: RewardConfig, sources: Iterable[SourceConfig]) -> None:
    """Check that the rewards can score the rows of all sources.

    Raises:
        UserError: a reward is for reasoning-gym's tasks, and a source is none.
    """
    gym = next((name for name in config.names if name in GYM_REWARDS), None)
    other = next((source.path for source in sources if not source.gym_task), None)
    if gym is not None and other is not None:
        raise UserError(
            f"the reward {gym!r} cannot score the rows of {other!r}",
            where="config: reward",
            fix='use another reward, or sources "reasoning_gym:NAME" alone',
        )


def takes_rows(config: RewardConfig) -> bool:
    """Whether a configured reward takes the data row's other columns.

    Raises:
        UserError: see `check_function`.
    """
    functions = [name for name in config.names if ":" in name and name not in REWARDS and not is_url(name)]
    kinds = [check_function(name, "config: reward") for name in functions]
    generated = not set(GYM_REWARDS).isdisjoint(config.names)
    sent = config.send_rows and any(map(is_url, config.names))
    return generated or sent or any(kind.takes_row for kind in kinds)


def data_for(config: Config) -> DataConfig:
    """Section [data], with the columns kept if the reward takes them."""
    return config.data.model_copy(update={"keep_columns": config.data.keep_columns or takes_rows(config.reward)})


def _build(name: str, config: RewardConfig, max_response_tokens: int) -> Reward:
    """One term that `_check` has accepted."""
    if make := REWARDS.get(name):
        return make(config, max_response_tokens)
    if is_url(name):
        return HttpReward(name, config)
    return FunctionReward(name, config)


def _check(name: str, config: RewardConfig, max_response_tokens: int, where: str) -> None:
    if name == "format":
        check_pattern(config.format_pattern)
    elif name in GYM_REWARDS:
        extension(GYM).check_package(where)
    elif name == "overlong":
        check_overlong(max_response_tokens, config.overlong_buffer_tokens)
    elif is_url(name):
        check_address(name, where)
    elif ":" in name and name not in REWARDS:
        check_function(name, where)
    elif name not in REWARDS:
        raise UserError(
            f"unknown reward {name!r}",
            where=where,
            fix=f'use one of {", ".join(REWARDS)}, or your own "package.module:function" or "http://HOST:PORT/PATH"',
        )
