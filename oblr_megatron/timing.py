"""Measures the seconds of each phase of a step: `with timer("rollout"): ...`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PHASES = ("rollout", "reward", "gradnorm", "gradient", "optimizer", "push", "evaluate", "checkpoint")


class PhaseTimer:
    """Collects seconds by phase and returns them at the end of the step.

        timer = PhaseTimer(on_phase=display.phase)
        with timer("rollout"):
            samples = engines.generate(...)
        ...
        metrics |= timer.finish_step()  # {"timing_s/rollout": 1.2, ..., "timing_s/step": 2.1}
        timer.own                       # {"rollout": 0.1, ...}: seconds without waiting

    A phase entered twice in a step adds up. Phases must not nest.

    Args:
        on_phase: called with each phase's name when it begins, and with None when it ends.
        synchronize: called at both ends of a phase. On a GPU, torch.cuda.synchronize charges each kernel to the phase
            that launched it.
        clock: seconds, monotonic.
        own_clock: seconds that exclude waiting (time.thread_time); None: same as `clock`.
        context: a context that is open during each phase.
    """

    def __init__(
        self,
        on_phase: Callable[[str | None], None] = lambda _: None,
        synchronize: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        own_clock: Callable[[], float] | None = None,
        context: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.own: dict[str, float] = {}  # own seconds by phase, of the last finished step
        self._on_phase, self._synchronize, self._clock, self._own_clock = on_phase, synchronize, clock, own_clock
        self._context = context
        self._seconds: dict[str, float] = {}
        self._own_seconds: dict[str, float] = {}
        self._current: str | None = None
        self._step_start: float | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time inside the block to `phase`, also if it raises."""
        assert phase in PHASES, f"{phase!r} is not one of the phases {PHASES}"
        assert self._current is None, f"phase {phase!r} begins inside phase {self._current!r}"
        self._synchronize()
        start, own_start = self._now()
        if self._step_start is None:
            self._step_start = start
        self._current = phase
        self._on_phase(phase)
        try:
            with nullcontext() if self._context is None else self._context(phase):
                yield
                self._synchronize()
        finally:
            end, own_end = self._now()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - start
            self._own_seconds[phase] = self._own_seconds.get(phase, 0.0) + own_end - own_start
            self._current = None
            self._on_phase(None)

    def finish_step(self) -> dict[str, float]:
        """Return the step's metrics and reset; "step" is the time since the first phase began."""
        now = self._clock()
        seconds = {**self._seconds, "step": now - (now if self._step_start is None else self._step_start)}
        self.own = self._own_seconds
        self._seconds, self._own_seconds, self._step_start = {}, {}, None
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}

    def _now(self) -> tuple[float, float]:
        """Seconds of `clock` and `own_clock`."""
        now = self._clock()
        return now, now if self._own_clock is None else self._own_clock()
