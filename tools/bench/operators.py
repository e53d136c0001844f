"""Profile a step by operator, and classify each operator as bounded by arithmetic or by memory traffic.

An operator is bounded by FLOPs if they take longer, at the machine's measured rate of a large matrix product, than its
tensor arguments take at the measured rate of a large copy. This roofline counts necessary work, not what a kernel
actually does. Operators other than matrix products and attention count as traffic. Operators without known tensors are
not classified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from meter import Meter, Step
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

BYTES = 4  # per element, fp32
WIDTH = 140  # columns of the tables
ATTENTION = "scaled_dot_product"
FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}  # argument index of the left factor


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one operator in a step.

    Example: Operator(name="aten::mm", calls=56, seconds=2.1, flops=1.6e11, read_bytes=3.1e9)
    """

    name: str
    calls: int
    seconds: float  # self time, without called operators
    flops: float  # 0 if unknown
    read_bytes: float  # size of its tensor arguments


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured peak rates: FLOP/s of a matrix product, bytes/s of a copy (read plus written)."""

    flops: float
    read_bytes: float

    def bound(self, operator: Operator) -> str:
        """The longer of "FLOPs" and "bytes"; "" if neither is known, as for autograd's own work."""
        times = {"FLOPs": operator.flops / self.flops, "bytes": operator.read_bytes / self.read_bytes}
        return max(times, key=lambda name: times[name]) if any(times.values()) else ""


def events_of(step: Step, device: torch.device) -> Any:
    """Profile one step; returns torch's averages by name and input shapes."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return recorded.key_averages(group_by_input_shape=True)


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
    totals: dict[str, list[float]] = {}
    for event in events_of(step, device):
        if event.device_type == DeviceType.CUDA:
            continue  # a kernel, which counts as its operator's
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) * 1e-6
        read = BYTES * event.count * sum(math.prod(shape) for shape in _tensors(event.input_shapes))
        total = totals.setdefault(event.key, [0, 0.0, 0.0, 0.0])
        for index, value in enumerate((event.count, seconds, _flops(event), read)):
            total[index] += value
    operators = [Operator(name, int(calls), *rest) for name, (calls, *rest) in totals.items()]
    return sorted(operators, key=lambda operator: -operator.seconds)


def measure_rates(device: torch.device) -> Rates:
    """Best of five [2048, 2048] matrix products and of five 128 MiB copies."""
    meter = Meter(device)
    left, right = torch.randn(2, 2048, 2048, device=device)
    source = torch.randn(2**25, device=device)
    target = torch.empty_like(source)
    product = min(meter.seconds(lambda: left @ right) for _ in range(5))
    copy = min(meter.seconds(lambda: target.copy_(source)) for _ in range(5))
    return Rates(flops=2 * 2048**3 / product, read_bytes=2 * source.nbytes / copy)


def show_operators(title: str, operators: list[Operator], rates: Rates, count: int = 15) -> None:
    """Print the longest operators and the share of time under each bound."""
    whole = sum(operator.seconds for operator in operators)
    headings = ("operator", "calls", "self s", "share", "GFLOP/s", "GB/s", "bound by")
    table = Table(*headings, title=title)
    for operator in operators[:count]:
        seconds = max(operator.seconds, 1e-9)
        table.add_row(
            operator.name[-60:],
            f"{operator.calls:,}",
            f"{operator.seconds:.3f}",
            f"{operator.seconds / whole:.1%}",
            f"{operator.flops / seconds / 1e9:.1f}" if operator.flops else "",
            f"{operator.read_bytes / seconds / 1e9:.1f}",
            rates.bound(operator),
        )
    shares = {"FLOPs": 0.0, "bytes": 0.0, "": 0.0}
    for operator in operators:
        shares[rates.bound(operator)] += operator.seconds / whole
    console = Console(width=WIDTH)
    console.print(table)
    console.print(
        f"of {whole:.3g} s {shares['FLOPs']:.0%} bounded by FLOPs, {shares['bytes']:.0%} by bytes; this machine: "
        f"{rates.flops / 1e9:.0f} GFLOP/s in a matrix product, {rates.read_bytes / 1e9:.1f} GB/s in a copy"
    )


def _tensors(shapes: list[Any]) -> list[list[int]]:
    """Shapes of tensor arguments, including lists of tensors. Other arguments have an empty shape and are skipped."""
    found: list[list[int]] = []
    for shape in shapes:
        if shape and isinstance(shape[0], (list, tuple)):
            found += _tensors(shape)
        elif shape:
            found.append(shape)
    return found


def _flops(event: Any) -> float:
    """FLOPs of all calls of a matrix product or causal attention; 0 for other operators."""
    name, shapes = event.key.removeprefix("aten::"), _tensors(event.input_shapes)
    if name in FACTORS:
        left, right = shapes[FACTORS[name] :][:2]  # [.., m, k] and [.., k, n]
        return event.count * 2.0 * math.prod(left) * right[-1]
    if ATTENTION in name and shapes:
        rows, heads, length, size = max(shapes, key=math.prod)  # shape of q or its gradient
        products = 5 if "backward" in name else 2  # [t, t] x head_dim products; backward recomputes the scores
        return event.count * products * 2.0 * rows * heads * length**2 * size / 2
    return 0.0
