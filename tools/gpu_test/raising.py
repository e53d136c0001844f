"""A rank of a run; the last rank raises in its second gradient. `-m tools.gpu_test.raising CONFIG.toml ...`"""

from __future__ import annotations

import time
from typing import Any

from oblr_megatron import step_loop
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import end_process, rank_from_environment

RAISED = "raised at"


def main() -> int:
    """The run, with a gradient that fails."""
    rank, world_size = rank_from_environment()
    calls, plain = 0, StepGradient.add

    def gradient(self: StepGradient, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and rank == world_size - 1:
            print(f"{RAISED} {time.time()}", flush=True)
            raise RuntimeError("raised on purpose")
        return plain(self, *arguments, **options)

    StepGradient.add = gradient  # type: ignore[method-assign]
    return step_loop.main()


if __name__ == "__main__":
    end_process(main)
