"""The user's own reward function "package.module:function", called in worker processes.

    def score(response: str, answer: str, prompt: str) -> float: ...
    def score(response: str, answer: str, prompt: str, row: dict[str, Any]) -> float: ...

The function may be async, take lists (responses, answers, prompts, rows), or both; see processes/calls.py. It is also
imported in this process before the run starts, so that a wrong name is reported at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.calls import BATCH, SINGLE, FunctionKind, kind_of, parameter_names
from oblr_megatron.processes.pool import Pool
from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, group_size, texts, whole_groups
from oblr_megatron.types import Prompt, Sample
from oblr_megatron.user_functions import import_from_here, resolve

GRACE_S = 1.0
"""Workers time out async calls themselves; a worker that has not answered this long after the deadline is killed."""


class FunctionReward(PooledReward):
    """Calls the function on every sample, or on batches of whole groups."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        """Workers start with the first batch. `name`: of a function that `check_function` accepts."""
        self._kind = kind_of(resolve(name))
        grace = GRACE_S if self._kind.awaited else 0.0
        pool = Pool(name, num_workers=config.num_workers, deadline_s=config.timeout_s, grace_s=grace)
        super().__init__(pool, together=config.batch_size if self._kind.takes_many else 1)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The function's values; see `Reward.score`."""
        group = group_size(prompts, samples)
        together = whole_groups(self.together, group) if self._kind.takes_many else 1
        return collect(self.pool.map(texts(prompts, samples, with_row=self._kind.takes_row), together))


def check_function(name: str, where: str) -> FunctionKind:
    """Import the function, also from the current directory, and check its parameters.

    It checks their number, and the order of those with reserved names, because arguments are positional.

    Raises:
        UserError: the function cannot be imported or is not callable, or its parameters do not fit.
    """
    function = import_from_here(name, f"reward {name!r}", where)
    kind = kind_of(function)
    every, wanted = BATCH if kind.batch else SINGLE, kind.parameters
    shape = f"function({', '.join(wanted)})"
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise UserError(
            f"reward {name!r} cannot be called as {shape}: {error}",
            where=where,
            fix=f"give it the parameters {', '.join(every[:-1])}, and {every[-1]} if it needs the row's other columns",
        ) from error
    except ValueError:
        return kind  # a builtin without a signature cannot be checked
    names = parameter_names(function)
    if any(one in (*SINGLE, *BATCH) and wanted[place : place + 1] != (one,) for place, one in enumerate(names)):
        raise UserError(
            f"reward {name!r} has the parameters {', '.join(names)}, but is called as {shape}",
            where=where,
            fix="use these names in this order; plural names for batches, singular names for single responses",
        )
    return kind
