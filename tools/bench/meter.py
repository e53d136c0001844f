"""Time and peak memory of a step: wall clock or processor time, CUDA's allocator or resident memory."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

Step = Callable[[], object]  # what it returns is not looked at
Clock = Literal["wall", "cpu"]


class Meter:
    """Measures steps on one device.

    Args:
        device: CUDA devices are waited for before the clock is read.
        clock: "wall", or "cpu", the time of this process on the processors: on a machine that others use at the same
            time it leaves out what they take. It says nothing of a GPU.
    """

    def __init__(self, device: torch.device, clock: Clock = "wall") -> None:
        self._cuda = device.type == "cuda"
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        assert not (self._cuda and clock == "cpu"), "the processor's time is not the GPU's"

    def seconds(self, step: Step) -> float:
        """Time of one step."""
        self._wait()
        start = self._now()
        step()
        self._wait()
        return self._now() - start

    def peak(self, make: Callable[[], Step]) -> int:
        """The largest memory held while a step is made and run once, in bytes, with all that is held anyway.

        CUDA: what its allocator had given out. Elsewhere: resident memory of the process, whose high-water mark Linux
        lets a process reset; where it cannot be reset the mark of all steps so far, an upper bound.
        """
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self.seconds(make())
            return torch.cuda.max_memory_allocated()
        return_freed_memory()
        reset = reset_resident_peak()
        self.seconds(make())
        return resident_peak() if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def reset_resident_peak() -> bool:
    """Set the high-water mark of resident memory to what is resident now; False where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or a sandbox that forbids it
        return False
    return True


def resident_peak() -> int:
    """The high-water mark of this process's resident memory, bytes (Linux)."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "Linux states VmHWM in /proc/self/status"
    return int(found[1]) * 1024


def return_freed_memory() -> None:
    """Have glibc give freed pages back, so that one step's leavings do not count for the next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
