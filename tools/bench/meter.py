"""Measure time and peak memory of a step: wall-clock or CPU time; CUDA allocator or resident memory."""

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

Step = Callable[[], object]  # the result is ignored
Clock = Literal["wall", "cpu"]


class Meter:
    """Measures steps on one device.

    Args:
        device: a CUDA device is synchronised before the clock is read.
        clock: "wall", or "cpu" for this process's CPU time, which ignores the load of other processes. "cpu" does not
            measure a GPU.
    """

    def __init__(self, device: torch.device, clock: Clock = "wall") -> None:
        self._cuda = device.type == "cuda"
        self._now = time.process_time if clock == "cpu" else time.perf_counter
        assert not (self._cuda and clock == "cpu"), "CPU time does not measure a GPU"

    def seconds(self, step: Step) -> float:
        """Seconds of one step."""
        self._wait()
        start = self._now()
        step()
        self._wait()
        return self._now() - start

    def peak(self, make: Callable[[], Step]) -> int:
        """Peak memory in bytes while a step is made and run once, including memory held before.

        On CUDA this is allocated memory, elsewhere the process's resident memory. Linux can reset its high-water mark;
        otherwise the result is the mark of all steps so far, an upper bound.
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
    """Reset the high-water mark of resident memory to the current value; False if the system does not support it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or a sandbox that forbids it
        return False
    return True


def resident_peak() -> int:
    """High-water mark of this process's resident memory in bytes (Linux)."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "/proc/self/status has no VmHWM"
    return int(found[1]) * 1024


def return_freed_memory() -> None:
    """Make glibc return freed pages, so that one step's freed memory does not count for the next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
