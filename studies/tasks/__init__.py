"""Tasks that a tiny model learns in a minute. They differ in what makes reinforcement learning hard.

    name      reward                        response length   purpose
    sums      0 or 1                        3 or 4 tokens     arithmetic of nearly fixed length; w varies little
    chain     0 or 1                        3 to 8 tokens     reasoning: long responses are right more often and have
                                                              larger gradients
    walk      1 only if every step is right 6 tokens          sparse: few groups have mixed rewards at the start
    brackets  graded between 0 and 1        2 to 7 tokens     no arithmetic: the state is a stack
    mixed     0 or 1                        3 to 5 tokens     prompts with pass rates from 2% to 98% at the start
    ledger    0 or 1                        50 to 90 tokens   written reasoning
    sums_plus_one, walk_signed                                sums with rewards 1 and 2; walk with rewards -1 and 1

To add a task, write a module with a `Task` and add it to TASKS.
"""

from dataclasses import replace

from studies.tasks.base import Row, Skill, Task
from studies.tasks.brackets import BRACKETS
from studies.tasks.chain import CHAIN
from studies.tasks.gym import GYM
from studies.tasks.ledger import LEDGER
from studies.tasks.mixed import MIXED
from studies.tasks.sums import SUMS
from studies.tasks.walk import WALK

SHIFTED = (replace(SUMS, name="sums_plus_one", shift=1.0), replace(WALK, name="walk_signed", scale=2.0, shift=-1.0))

TASKS: dict[str, Task] = {task.name: task for task in (SUMS, CHAIN, WALK, BRACKETS, MIXED, LEDGER, *SHIFTED, *GYM)}

__all__ = ["TASKS", "Row", "Skill", "Task"]
