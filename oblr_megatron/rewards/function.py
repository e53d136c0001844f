"""A reward of the user's own, named "package.module:function"; it judges in worker processes.

    def score(response: str, answer: str, prompt: str) -> float: ...

The module is imported here too, before anything is started, so that a wrong name is a clear error and not a failed run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import PooledReward, RewardResult, pair
from oblr_megatron.rewards.nursery import resolve
from oblr_megatron.rewards.pool import Pool
from oblr_megatron.types import Prompt, Sample

ARGUMENTS = ("response", "answer", "prompt")
WHERE = "config: reward.name"


class FunctionReward(PooledReward):
    """Calls the function on every sample."""

    def __init__(self, name: str, *, num_workers: int, deadline_s: float) -> None:
        """Check the function; workers are started with the first batch.

        Raises:
            UserError: see `check_function`.
        """
        check_function(name)
        super().__init__(Pool(name, num_workers=num_workers, deadline_s=deadline_s))

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The function's values; see `Reward.score`."""
        batch = [(sample.text, prompt.answer, prompt.text) for prompt, sample in pair(prompts, samples)]
        return self.collect(self.pool.map(batch))


def check_function(name: str) -> None:
    """Import the function; modules beside the user (the current directory) are found, too.

    Raises:
        UserError: it cannot be imported, is not callable, or cannot take (response, answer, prompt).
    """
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        function = resolve(name)
    except Exception as error:  # importing the user's module may raise anything
        raise UserError(
            f"reward {name!r} cannot be imported: {type(error).__name__}: {error}",
            where=WHERE,
            mend='give "package.module:function" as Python would import it from here',
        ) from error
    if not callable(function):
        raise UserError(f"reward {name!r} is not callable", where=WHERE, mend="name a function")
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except TypeError as error:
        raise UserError(
            f"reward {name!r} cannot be called as function(response, answer, prompt): {error}",
            where=WHERE,
            mend="give it these three parameters, all strings",
        ) from error
    except ValueError:
        return  # a builtin without a signature: the first call will tell
