"""Tasks that a tiny model learns in a minute, and that differ in what makes reinforcement learning hard.

    name      reward                     response length     what it is for
    sums      right or wrong             3 or 4 tokens       arithmetic of fixed length; w varies little
    chain     right or wrong             3 to 9 tokens       reasoning: long answers are right more often, and their
                                                             gradients larger
    walk      right only if every step   7 tokens            sparse: few groups are mixed at the start
    brackets  graded between 0 and 1     2 to 7 tokens       no arithmetic: the state is a stack

To add one, write a module with a `Task` and name it here.
"""

from studies.tasks.base import Row, Skill, Task
from studies.tasks.brackets import BRACKETS
from studies.tasks.chain import CHAIN
from studies.tasks.sums import SUMS
from studies.tasks.walk import WALK

TASKS: dict[str, Task] = {task.name: task for task in (SUMS, CHAIN, WALK, BRACKETS)}

__all__ = ["TASKS", "Row", "Skill", "Task"]
