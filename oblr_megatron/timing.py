"""Wall-clock time of the phases of a step; the loop says only `with timer("rollout"):`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "reward", "gradnorm", "gradient", "optimizer", "push", "evaluate", "checkpoint")


class PhaseTimer:
    """Collects seconds by phase and hands them over at the end of the step.

        timer = PhaseTimer(on_phase=display.phase)
        with timer("rollout"):
            samples = engines.generate(...)
        ...
        metrics |= timer.finish_step()  # {"timing_s/rollout": 1.2, ..., "timing_s/step": 2.1}

    A phase entered twice in a step adds up. Phases do not nest: the inner one would be counted twice.

    Args:
        on_phase: told each phase's name when it begins, and None when it ends.
        synchronize: called at both ends of a phase; torch.cuda.synchronize on a GPU, where a phase would otherwise be
            charged for kernels of the one before.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        on_phase: Callable[[str | None], None] = lambda _: None,
        synchronize: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_phase, self._synchronize, self._clock = on_phase, synchronize, clock
        self._seconds: dict[str, float] = {}
        self._current: str | None = None
        self._step_start: float | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time inside to `phase`; an exception passes through and is charged as well."""
        assert phase in PHASES, f"{phase!r} is not one of the phases {PHASES}"
        assert self._current is None, f"phase {phase!r} begins inside phase {self._current!r}"
        self._synchronize()
        start = self._clock()
        if self._step_start is None:
            self._step_start = start
        self._current = phase
        self._on_phase(phase)
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start
            self._current = None
            self._on_phase(None)

    def finish_step(self) -> dict[str, float]:
        """The step's metrics, and a clean slate; "step" runs from the first phase's begin until now."""
        now = self._clock()
        seconds = {**self._seconds, "step": now - (now if self._step_start is None else self._step_start)}
        self._seconds, self._step_start = {}, None
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}
