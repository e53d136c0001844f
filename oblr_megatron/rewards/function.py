"""The user's own reward function "package.module:function", called in worker processes.

    def score(response: str, answer: str, prompt: str) -> float: ...
    def score(response: str, answer: str, prompt: str, row: dict[str, Any]) -> float: ...

Arguments go by name, in any order. The function may be async, take lists (responses, answers, prompts, rows), or both;
see processes/calls.py. It is also imported in this process before the run starts, so that a wrong name is reported at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.calls import BATCH, SINGLE, FunctionKind, kind_of, parameters_of
from oblr_megatron.processes.pool import Pool
from oblr_megatron.rewards.base import PooledReward, RewardResult, collect, group_size, texts, whole_groups
from oblr_megatron.types import Prompt, Sample
from oblr_megatron.user_functions import import_from_here, resolve

GRACE_S = 1.0
"""Workers time out async calls themselves; a worker that has not answered this long after the deadline is killed."""
ELSEWHERE = {  # parameters of rewards of verl, TRL, OpenRLHF, verifiers and ms-swift
    "solution_str": "response", "completion": "response", "completions": "responses",
    "ground_truth": "answer", "solution": "answer or answers", "labels": "answers",
    "data_source": 'row["data_source"]', "extra_info": 'row["extra_info"]',
}  # fmt: skip


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
        names = self._kind.parameters if self._kind.batch else [BATCH[SINGLE.index(n)] for n in self._kind.parameters]
        return collect(self.pool.map(texts(prompts, samples, names), together))


def check_function(name: str, where: str) -> FunctionKind:
    """Import the function, also from the current directory, and check the names of its parameters.

    Raises:
        UserError: the function cannot be imported or is not callable, or needs an argument that does not exist.
    """
    function = import_from_here(name, f"reward {name!r}", where)
    kind, parameters = kind_of(function), parameters_of(function)
    wanted = BATCH if kind.batch else SINGLE
    others = [
        one for one in parameters if one.name not in wanted and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    needed = [one.name for one in others if one.default is one.empty or one.name in ELSEWHERE]
    if not needed and wanted[0] in kind.parameters and not any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        return kind
    here = "".join(f"; {one} is {ELSEWHERE[one]} here" for one in needed if one in ELSEWHERE)
    own = ", ".join(one.name for one in parameters)
    raise UserError(
        f"reward {name!r} has the parameters ({own}), but gets its arguments by the names {', '.join(wanted)}",
        where=where,
        fix="name those of them that it needs, in any order, with a default for any other parameter; "
        f"plural names get lists, singular names single responses{here}",
    )
