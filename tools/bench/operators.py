"""Profile a step by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from meter import Step
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one operator in a step.

    Example: Operator(name="aten::mm", calls=56, seconds=2.1)
    """

    name: str
    calls: int
    seconds: float  # self time, without called operators


def events_of(step: Step, device: torch.device) -> Any:
    """Profile one step; returns torch's averages by name."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return recorded.key_averages()


def busy_seconds(step: Step, device: torch.device) -> float:
    """Profile one step; returns the seconds of all kernels of a GPU, or of all operators of a CPU."""
    events = events_of(step, device)
    if device.type == "cuda":
        kernels = (one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation)
        return sum(kernel.self_device_time_total for kernel in kernels) * 1e-6
    return sum(event.self_cpu_time_total for event in events) * 1e-6


def operators_of(step: Step, device: torch.device) -> list[Operator]:
    """Profile one step; returns its operators, longest first."""
    cuda = device.type == "cuda"
    operators = [
        Operator(event.key, event.count, (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6)
        for event in events_of(step, device)
        if event.device_type != DeviceType.CUDA  # a kernel, which counts as its operator's
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)
