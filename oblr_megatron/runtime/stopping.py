"""Early stop of a run: on a signal, or near the time limit. Imports no torch at load.

    with StopRequest(config.checkpoint) as stop:
        for step in ...:
            ...
            reason = stop.agreed(longest_step_s, group)  # at the step boundary; the same on every rank
            if reason:                                   # "SIGUSR1", "SIGTERM" or "the time limit"
                save and end

SLURM's `--signal=USR1@120` and `scancel` may reach some or all ranks, and twice if the launcher forwards them
(launch.py). The handler only notes the signal, and the current step is finished. Engines and reward workers ignore
these signals, because the step needs them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from oblr_megatron.config.checkpoint import CheckpointConfig

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 1.0
"""A SIGTERM within this time of the first counts as the same signal: SLURM sends it to the ranks and to the launcher,
which forwards it."""
SLURM_END = "SLURM_JOB_END_TIME"  # seconds since the epoch
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun for its ranks
STDERR = 2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
REASONS = (None, "the time limit", "SIGUSR1", "SIGTERM")  # ranks agree on the largest index


class StopRequest:
    """Context manager that notes signals and watches the time limit, on every rank.

    Args:
        options: section [checkpoint] of the run.
        environment: holds SLURM's variables; by default the process's environment.

    Raises:
        UserError: `exit_before_timeout_s` is set, but no time limit is known.
    """

    def __init__(self, options: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> None:
        self._margin_s = options.exit_before_timeout_s
        self._end = end_of_job(options, environment)
        self._speaks = environment.get("LOCAL_RANK", "0") == "0"
        self._received: signal.Signals | None = None
        self._terminated_at: float | None = None  # the first SIGTERM, monotonic clock
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            self._former = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def due(self, longest_step_s: float) -> str | None:
        """Reason for this rank to stop now, or None.

        Args:
            longest_step_s: longest step so far, seconds; the next one may take as long.
        """
        if self._received is not None:
            return self._received.name
        if self._end is not None and self._margin_s and time.time() + longest_step_s + self._margin_s > self._end:
            return "the time limit"
        return None

    def agreed(self, longest_step_s: float, group: ProcessGroup | None) -> str | None:
        """Reason for the run to stop now, or None; the same on every rank if any rank has a reason.

        Args:
            longest_step_s: as for `due`.
            group: process group of all ranks that reduces CPU tensors; None for a single rank.
        """
        import torch
        import torch.distributed as dist

        own = torch.tensor([REASONS.index(self.due(longest_step_s))])
        if group is not None:
            dist.all_reduce(own, dist.ReduceOp.MAX, group)
        return REASONS[int(own)]

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. A second SIGTERM more than REPEAT_S after the first ends the process at once."""
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._terminated_at is not None and now - self._terminated_at > REPEAT_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._terminated_at = self._terminated_at or now
        if self._received is None and self._speaks:
            line = f"{signal.Signals(number).name}: saving at the next step boundary\n"
            os.write(STDERR, line.encode())  # print fails if the signal interrupted a print
        if self._received != signal.SIGTERM:
            self._received = signal.Signals(number)


def end_of_job(options: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> float | None:
    """Time at which the job will be killed, seconds since the epoch; None if unknown.

    A configured limit counts from the start of the process or of its launcher. The default is SLURM's limit.

    Raises:
        UserError: `exit_before_timeout_s` is set, but no time limit is known.
    """
    if options.time_limit_s is not None:
        return started_at(os.getppid() if TORCHRUN in environment else os.getpid()) + options.time_limit_s
    if environment.get(SLURM_END, "").isdecimal():
        return float(environment[SLURM_END])
    if options.exit_before_timeout_s:
        raise UserError(
            f"checkpoint.exit_before_timeout_s is {options.exit_before_timeout_s:g}, but no time limit is known",
            where=f"config: checkpoint.time_limit_s, environment: {SLURM_END}",
            fix="set checkpoint.time_limit_s to the job's time limit in seconds",
        )
    return None


def started_at(pid: int) -> float:
    """Start time of a process, seconds since the epoch."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
    ticks = int(after_name.split()[19])  # field 22 of proc(5), since boot
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """End this rank when its torchrun launcher ends, however that happens.

    Otherwise a surviving rank could write into the run directory while the resumed run does.
    """
    if TORCHRUN in environment:
        die_with(os.getppid())


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, and exit at once if it already has.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
