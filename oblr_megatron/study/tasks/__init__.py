"""Tasks that a tiny model learns in a minute, and that differ in what makes reinforcement learning hard.

    name      reward                     response length     what it is for
    sums      right or wrong             3 or 4 tokens       arithmetic of fixed length; w varies little
    chain     right or wrong             3 to 9 tokens       reasoning: long answers are right more often, and their
                                                             gradients larger
    walk      right only if every step   7 tokens            sparse: few groups are mixed at the start
    brackets  graded between 0 and 1     2 to 7 tokens       no arithmetic: the state is a stack

To add one, write a module with a `Task` and name it here.
"""

from oblr_megatron.study.tasks.base import Row, Skill, Task
from oblr_megatron.study.tasks.brackets import BRACKETS
from oblr_megatron.study.tasks.chain import CHAIN
from oblr_megatron.study.tasks.sums import SUMS
from oblr_megatron.study.tasks.walk import WALK

TASKS: dict[str, Task] = {task.name: task for task in (SUMS, CHAIN, WALK, BRACKETS)}

__all__ = ["TASKS", "Row", "Skill", "Task"]
