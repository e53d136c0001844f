"""Early stop of a run: on a signal, or near the time limit. Imports no torch at load.

    with StopRequest(config.checkpoint) as stop:
        for step in ...:
            stop.stepping = True
            ...
            reason = stop.shared_reason(longest_step_s, group)  # at the step boundary; the same on every rank
            if reason:                                   # "SIGUSR1", "SIGINT", ... or "the time limit"
                save and end

SLURM's `--signal=USR1@120` and `scancel` may reach some or all ranks, and twice if the launcher forwards them
(launch.py). A signal is only noted, and the current step is finished. Engines and reward workers ignore these signals,
because the step needs them. Before the first step one of ENDING ends the run at once.

A second signal ends the process at once, also while the main thread waits in a collective. Python runs signal handlers
only in the main thread. So a thread reads the signal numbers from the pipe of `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from oblr_megatron.errors import EXIT_RUN, EXIT_SIGNAL, UserError
from oblr_megatron.runtime.processes import launched, lost_rank, started_at

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from oblr_megatron.config.checkpoint import CheckpointConfig

ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals that end the process at once when one of them comes again."""
SIGNALS = (*ENDING, signal.SIGUSR1)
REPEAT_S = 1.0
"""Signals within this time of the first count as the same one: SLURM sends SIGTERM to the ranks and to the launcher,
which forwards it."""
KEY_REPEAT_S = 0.2  # the same for SIGINT; a terminal sends it once
LOST_RANK_S = 5.0  # for a rank to find out by itself that another one is lost
CLOSING_S = 25.0  # for a rank that is closing by then, such as its trackers; torchrun kills after 30 s
SLURM_END = "SLURM_JOB_END_TIME"  # seconds since the epoch
STDERR = 2
REASONS = (None, "the time limit", "SIGUSR1", "SIGINT", "SIGHUP", "SIGTERM")  # ranks agree on the largest index


class StopRequest:
    """Context manager that notes signals and watches the time limit, on every rank.

    Args:
        options: section [checkpoint] of the run.
        environment: holds SLURM's and torchrun's variables; by default the process's environment.

    Attributes:
        stepping: whether the run has reached its first step. Until then ENDING raise KeyboardInterrupt(name).
        closing: whether the run is ending by itself.
        at_once: called with the reason before a second signal ends the process.

    Raises:
        UserError: `exit_before_timeout_s` is set, but no time limit is known.
    """

    def __init__(self, options: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> None:
        self.stepping = self.closing = False
        self.at_once: Callable[[str], None] = lambda reason: None
        self._margin_s = options.exit_before_timeout_s
        self._end = end_of_job(options, environment)
        self._environment = environment
        self._speaks = environment.get("LOCAL_RANK", "0") == "0"
        self._received: signal.Signals | None = None
        self._interrupted = False
        self._ending_at: float | None = None  # arrival of the first of ENDING, monotonic clock
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.RLock()  # a handler may interrupt a handler

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, end == self._pipe[0])
            self._former = {number: signal.signal(number, self._interrupt) for number in handled()}
            self._former_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # ends the thread
        self._former, self._pipe = {}, None

    @property
    def terminated(self) -> bool:
        """Whether this rank has got SIGTERM, as in a preemption, which often ends the servers as well."""
        return self._received == signal.SIGTERM

    def due(self, longest_step_s: float) -> str | None:
        """Reason for this rank to stop now, or None; the next step may take `longest_step_s`."""
        if self._received is not None:
            return self._received.name
        if self._end is not None and self._margin_s and time.time() + longest_step_s + self._margin_s > self._end:
            return "the time limit"
        return None

    def shared_reason(self, longest_step_s: float, group: ProcessGroup | None) -> str | None:
        """Reason for the run to stop now, or None; the same on every rank if any rank has a reason.

        The group has all ranks and reduces CPU tensors; None for a single rank.
        """
        import torch
        import torch.distributed as dist

        own = torch.tensor([REASONS.index(self.due(longest_step_s))])
        if group is not None:
            dist.all_reduce(own, dist.ReduceOp.MAX, group)
        return REASONS[int(own)]

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the main thread: note a signal in time for the next `due`."""
        at_once = number in ENDING and not self.stepping
        if at_once and not (number == signal.SIGTERM and lost_rank(self._environment)):
            if not self._interrupted:  # the same signal may come twice, and would break off the cleaning up
                self._interrupted = True
                raise KeyboardInterrupt(signal.Signals(number).name)
            return
        self._note(signal.Signals(number))

    def _listen(self, pipe: int) -> None:
        """In a thread: act on a signal while the main thread cannot."""
        while numbers := os.read(pipe, 64):
            for number in numbers:
                if number in SIGNALS:  # a library may handle others
                    self._act(signal.Signals(number))
        os.close(pipe)

    def _act(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and lost_rank(self._environment):
            time.sleep(LOST_RANK_S)
            while self.closing and time.monotonic() < now + CLOSING_S:
                time.sleep(0.2)
            os._exit(EXIT_RUN)
        if number in ENDING:
            within = KEY_REPEAT_S if number == signal.SIGINT else REPEAT_S
            if self._ending_at is not None and now - self._ending_at > within:
                self._end_at_once(number, f"{number.name}, twice")
            self._ending_at = self._ending_at or now
            if not self.stepping:
                timer = threading.Timer(REPEAT_S, self._end_a_wait, (number,))
                timer.daemon = True
                timer.start()
        if self.stepping:
            self._note(number)

    def _end_a_wait(self, number: signal.Signals) -> None:
        """End a main thread that waits in C, e.g. for other ranks, where no exception reaches it."""
        if not (self._interrupted or self.stepping or self._pipe is None):
            self._end_at_once(number, number.name)

    def _end_at_once(self, number: signal.Signals, reason: str) -> NoReturn:
        self.at_once(reason)
        if self._speaks and not launched(self._environment):  # the launcher has a line of its own
            _print(f"error: ended by {number.name}")
        os._exit(EXIT_SIGNAL + number)

    def _note(self, number: signal.Signals) -> None:
        with self._lock:
            first = self._received is None
            if self._received != signal.SIGTERM:
                self._received = number
        if first and self._speaks and not (number == signal.SIGTERM and lost_rank(self._environment)):
            hint = "; press Ctrl-C again to end at once" if number == signal.SIGINT else ""
            what = "saving at the next step boundary" if self.stepping else "stopping before the first step"
            what = "the run is ending by itself" if self.closing else what
            _print(f"{number.name}: {what}{hint}")


def handled() -> list[signal.Signals]:
    """SIGNALS, without SIGHUP where `nohup` has made this process ignore it."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _print(line: str) -> None:
    with suppress(OSError):  # its reader has gone away
        os.write(STDERR, f"{line}\n".encode())  # print fails if the signal interrupted a print


def check_time_left(options: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a run that would stop after its first step, because the time limit is not above the margin.

    Raises:
        UserError: names both; or no time limit is known.
    """
    end, margin = end_of_job(options, environment), options.exit_before_timeout_s
    left = math.inf if end is None else options.time_limit_s or end - time.time()
    if margin and left <= margin:
        raise UserError(
            f"the time limit is in {left:.0f} s, so the run would stop after its first step",
            where=f"config: checkpoint.exit_before_timeout_s = {margin:g}",
            fix="allow the job more time, or shorten checkpoint.exit_before_timeout_s",
        )


def end_of_job(options: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> float | None:
    """Time at which the job will be killed, seconds since the epoch; None if unknown.

    A configured limit counts from the start of the process or of its launcher. The default is SLURM's limit.

    Raises:
        UserError: `exit_before_timeout_s` is set, but no time limit is known.
    """
    if options.time_limit_s is not None:
        return started_at(os.getppid() if launched(environment) else os.getpid()) + options.time_limit_s
    if environment.get(SLURM_END, "").isdecimal():
        return float(environment[SLURM_END])
    if options.exit_before_timeout_s:
        raise UserError(
            f"checkpoint.exit_before_timeout_s is {options.exit_before_timeout_s:g}, but no time limit is known",
            where=f"config: checkpoint.time_limit_s, environment: {SLURM_END}",
            fix="set checkpoint.time_limit_s to the job's time limit in seconds",
        )
    return None
