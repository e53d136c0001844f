"""Profiles chosen steps on the first rank, with the phases of a step as ranges named "oblr/<phase>" (`log.profile`).

    torch  one trace, RUN_DIR/profile/rank_0.json.gz; open it at https://ui.perfetto.dev or chrome://tracing
    nsys   NVTX ranges, and cudaProfilerStart/Stop around the steps, for a job started under
           nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop --output=... COMMAND

A profiled step includes rollout, training, weight push and evaluation. Its checkpoint is included only if the next step
is profiled as well. The profiler observes the phase timer (timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.config.log import LogConfig


class TorchProfile:
    """torch.profiler of CPU operators and CUDA kernels; written as one compressed Chrome trace."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._profile: Any = None

    def start(self) -> None:
        """Start recording."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()

    def stop(self) -> str:
        """Write the trace, replacing an earlier one of this rank; where it is. A failed write does not end the run."""
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._file))
        except OSError as error:
            return f"profile: {self._file} could not be written: {error}"
        return f"profile: {self._file}; open it at https://ui.perfetto.dev"

    def range(self, name: str) -> AbstractContextManager[object]:
        """A user annotation in the trace."""
        return torch.profiler.record_function(name)


class NsysProfile:
    """Marks steps for `nsys profile`, which records from outside."""

    def start(self) -> None:
        """Call cudaProfilerStart, which --capture-range=cudaProfilerApi waits for."""
        torch.cuda.profiler.start()

    def stop(self) -> str:
        """Call cudaProfilerStop; nsys writes its report."""
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return "profile: marked the steps for nsys, which writes to its --output file"

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """An NVTX range."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


Backend = TorchProfile | NsysProfile


class Profiler:
    """Profiles steps `start` to `end` - 1, counted from 0.

    A run resumed in the middle of these steps is profiled from there.
    """

    def __init__(self, backend: Backend, start: int, end: int, say: Callable[[str], None]) -> None:
        self._backend, self._start, self._end, self._say = backend, start, end, say
        self._step = 0
        self._recording = False

    def begin_step(self, step: int) -> None:
        """Start recording at the first of these steps."""
        self._step = step
        if not self._recording and self._start <= step < self._end:
            self._recording = True
            self._backend.start()

    def end_step(self) -> None:
        """Stop recording after the last of these steps."""
        if self._step + 1 >= self._end:
            self.close()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A range of the profile."""
        return self._backend.range(f"oblr/{name}") if self._recording else nullcontext()

    def close(self) -> None:
        """Stop recording if necessary, so that an interrupted run keeps its profile."""
        if self._recording:
            self._recording = False
            self._say(self._backend.stop())


@contextmanager
def open_profiler(config: Config, rank: int, say: Callable[[str], None]) -> Iterator[Profiler | None]:
    """The profiler that log.profile selects; None on ranks other than the first."""
    log = config.log
    if log.profile == "none" or rank != 0:
        yield None
        return
    file = config.run_dir / "profile" / "rank_0.json.gz"
    backend: Backend = TorchProfile(file) if log.profile == "torch" else NsysProfile()
    profiler = Profiler(backend, log.profile_step_start, log.profile_step_end, say)
    try:
        yield profiler
    finally:
        profiler.close()


def check_profile(log: LogConfig, *, on_gpu: bool) -> None:
    """Check that this machine allows the configured profile.

    Raises:
        UserError: nsys without CUDA.
    """
    if log.profile == "nsys" and not on_gpu:
        what, fix = 'log.profile is "nsys", but there is no GPU', 'set log.profile to "torch"'
        raise UserError(what, where="log.profile", fix=fix)
