"""A reward of the user's own, named "package.module:function"; it judges in worker processes.

    def score(response: str, answer: str, prompt: str) -> float: ...

Or async, or of lists (responses, answers, prompts), or both: calls.py says how each kind is called. The module is
imported here too, before anything is started, so that a wrong name is a clear error and not a failed run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, group_size, texts, whole_groups
from oblr_megatron.rewards.workers.calls import BATCH, SINGLE, kind_of, parameter_names
from oblr_megatron.rewards.workers.fork_server import resolve
from oblr_megatron.rewards.workers.pool import Pool
from oblr_megatron.types import Prompt, Sample

GRACE_S = 1.0
"""A worker of async calls gives up the late ones itself; one that has not answered so long after is ended."""


class FunctionReward(PooledReward):
    """Calls the function on every sample, or on batches of whole groups."""

    def __init__(self, name: str, *, num_workers: int, deadline_s: float, batch_size: int) -> None:
        """Workers are started with the first batch.

        Args:
            name: of a function that `check_function` accepts.
            num_workers: processes that judge at once.
            deadline_s: of a response, or of a batch where the function takes batches.
            batch_size: responses that a batch or async function gets, rounded up to whole groups.
        """
        kind = kind_of(resolve(name))
        grace = GRACE_S if kind.awaited else 0.0
        pool = Pool(name, num_workers=num_workers, deadline_s=deadline_s, grace_s=grace)
        super().__init__(pool, together=batch_size if kind.takes_many else 1)
        self._takes_many = kind.takes_many

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The function's values; see `Reward.score`."""
        group = group_size(prompts, samples)
        together = whole_groups(self.together, group) if self._takes_many else 1
        return collect(self.pool.map(texts(prompts, samples), together))


def check_function(name: str, where: str) -> None:
    """Import the function; modules beside the user (the current directory) are found, too.

    Raises:
        UserError: it cannot be imported, is not callable, or cannot be called with what a reward gets.
    """
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        function = resolve(name)
    except Exception as error:  # importing the user's module may raise anything
        raise UserError(
            f"reward {name!r} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            fix='give "package.module:function" as Python would import it from here',
        ) from error
    if not callable(function):
        raise UserError(f"reward {name!r} is not callable", where=where, fix="name a function")
    _check_parameters(name, function, where)


def _check_parameters(name: str, function: Callable[..., Any], where: str) -> None:
    """Arguments go by position: their number has to fit, and names that are ours have to stand where we pass them."""
    wanted = BATCH if kind_of(function).batch else SINGLE
    shape = f"function({', '.join(wanted)})"
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise UserError(
            f"reward {name!r} cannot be called as {shape}: {error}",
            where=where,
            fix=f"give it these three parameters, all {'lists of ' if wanted is BATCH else ''}strings",
        ) from error
    except ValueError:
        return  # a builtin without a signature: the first call will tell
    names = parameter_names(function)
    if any(one in (*SINGLE, *BATCH) and wanted[place : place + 1] != (one,) for place, one in enumerate(names)):
        raise UserError(
            f"reward {name!r} has the parameters {', '.join(names)}, and is called as {shape}",
            where=where,
            fix="bring them into this order; all in the plural for batches, none for single responses",
        )
