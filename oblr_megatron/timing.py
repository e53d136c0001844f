"""Wall-clock time of the phases of a step; the loop says only `with timer("rollout"):`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

PHASES = ("rollout", "reward", "gradnorm", "gradient", "optimizer", "push", "evaluate", "checkpoint")


class StepObserver(Protocol):
    """What hangs on a timer to see steps and phases go by: the profiler (observe/performance/profiler.py)."""

    def begin_step(self, step: int) -> None:
        """Step `step` begins, counted from 0."""

    def end_step(self) -> None:
        """That step's figures are taken."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Entered with a phase, left with it."""
        ...


class _Unobserved:
    def begin_step(self, step: int) -> None:
        pass

    def end_step(self) -> None:
        pass

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()


class PhaseTimer:
    """Collects seconds by phase and hands them over at the end of the step.

        timer = PhaseTimer(on_phase=display.phase)
        timer.begin_step(0)
        with timer("rollout"):
            samples = engines.generate(...)
        ...
        metrics |= timer.finish_step()  # {"timing_s/rollout": 1.2, ..., "timing_s/step": 2.1}
        timer.own                       # {"rollout": 0.1, ...}: the rest of it this process waited

    A phase entered twice in a step adds up. Phases do not nest: the inner one would be counted twice.

    Args:
        on_phase: told each phase's name when it begins, and None when it ends.
        synchronize: called at both ends of a phase; torch.cuda.synchronize on a GPU, where a phase would otherwise be
            charged for kernels of the one before.
        clock: seconds, monotonic.
        own_clock: seconds that stand still while this process waits (time.thread_time); None: the same as `clock`.
        observer: of steps and phases.
    """

    def __init__(
        self,
        on_phase: Callable[[str | None], None] = lambda _: None,
        synchronize: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        own_clock: Callable[[], float] | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.own: dict[str, float] = {}  # own seconds by phase, of the step finished last
        self._on_phase, self._synchronize, self._clock, self._own_clock = on_phase, synchronize, clock, own_clock
        self._observer: StepObserver = observer or _Unobserved()
        self._seconds: dict[str, float] = {}
        self._own_seconds: dict[str, float] = {}
        self._current: str | None = None
        self._step_start: float | None = None

    def begin_step(self, step: int) -> None:
        """Tell the observer; time runs from the first phase on."""
        self._observer.begin_step(step)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time inside to `phase`; an exception passes through and is charged as well."""
        assert phase in PHASES, f"{phase!r} is not one of the phases {PHASES}"
        assert self._current is None, f"phase {phase!r} begins inside phase {self._current!r}"
        self._synchronize()
        start, own_start = self._now()
        if self._step_start is None:
            self._step_start = start
        self._current = phase
        self._on_phase(phase)
        try:
            with self._observer.phase(phase):
                yield
                self._synchronize()
        finally:
            end, own_end = self._now()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - start
            self._own_seconds[phase] = self._own_seconds.get(phase, 0.0) + own_end - own_start
            self._current = None
            self._on_phase(None)

    def finish_step(self) -> dict[str, float]:
        """The step's metrics, and a clean slate; "step" runs from the first phase's begin until now."""
        now = self._clock()
        seconds = {**self._seconds, "step": now - (now if self._step_start is None else self._step_start)}
        self.own = self._own_seconds
        self._seconds, self._own_seconds, self._step_start = {}, {}, None
        self._observer.end_step()
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}

    def _now(self) -> tuple[float, float]:
        """Seconds of both clocks."""
        now = self._clock()
        return now, now if self._own_clock is None else self._own_clock()
