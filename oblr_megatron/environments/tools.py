"""Tools: plain Python functions that the policy may call, described to it by their signature and docstring.

    def calculate(expression: str) -> str:
        \"\"\"Evaluate an arithmetic expression.

        Args:
            expression: e.g. "12 * (3 + 4)"
        \"\"\"

    box = Toolbox(["package.module:calculate"], num_workers=2, deadline_s=10.0)
    await box.call("calculate", {"expression": "6*7"})       # "42"

They run in the workers of a pool (processes/): processes with a deadline and a memory limit. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oblr_megatron.processes.pool import Pool
from oblr_megatron.user_functions import absolute, resolve

LONGEST = 10_000
"""Characters of a tool's result; the rest is cut."""
CUT = " ... (the rest is cut)"
"""What the policy reads in its place."""


class Toolbox:
    """The tools of a run in worker processes, which start with the first call."""

    def __init__(self, tools: Sequence[str], *, num_workers: int, deadline_s: float) -> None:
        """Args:
        tools: "package.module:function" of each.
        num_workers: processes; as many calls run at a time.
        deadline_s: of one call.
        """
        self._targets = {tool.rpartition(":")[2]: absolute(tool) for tool in tools}  # a call may change the directory
        self._deadline_s = deadline_s
        self._pool = Pool(
            f"{__name__}:run_tool",
            num_workers=num_workers,
            deadline_s=deadline_s,
            grace_s=1.0,
            imports=tuple(self._targets.values()),
            returns_text=True,
        )

    async def call(self, name: str, arguments: Mapping[str, Any], begun: Callable[[], object] = lambda: None) -> str:
        """The tool's result as text; "Error: ..." for the policy to read if there is none.

        `begun` is called in a thread when a worker begins with the call. It is not if there is no worker.
        """
        if name not in self._targets:
            return f"Error: there is no tool {name!r:.100}; the tools are {', '.join(self._targets)}"
        call = self._pool.submit([(self._targets[name], json.dumps(arguments))], begun)
        [score] = await asyncio.wrap_future(call)
        if score.text is not None:
            return score.text if len(score.text) <= LONGEST else f"{score.text[:LONGEST]}{CUT}"
        if score.timed_out:
            return f"Error: the tool took longer than {self._deadline_s:g} seconds"
        return f"Error: {score.error.strip().splitlines()[-1]:.500}"

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def run_tool(target: str, arguments: str) -> object:
    """In a worker: call the tool with its arguments, a JSON object."""
    return resolve(target)(**json.loads(arguments))
