"""One thread of gloo per process instead of one per process group.

Each process group of torch's gloo backend opens a device of its own. The device's thread wakes again and again, also
when nothing arrives. megatron-core and vLLM make a group for each kind of parallelism, so many idle threads take
processor time. Groups that share a device share its thread.

Only for machines without CUDA: there gloo carries all collectives, and ranks and engines share the cores.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as c10d

_ORIGINAL: Any = c10d.ProcessGroupGloo


class _SharedDevice(type):
    """Stands in for the class `ProcessGroupGloo`: makes real groups, and recognises them."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta = c10d.default_pg_timeout) -> Any:
        options = _ORIGINAL._Options()
        options._devices = _devices(os.getpid())
        options._threads = 2 * len(options._devices)  # as torch has it
        options._timeout = timeout
        return _ORIGINAL(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _ORIGINAL)


class ProcessGroupGloo(metaclass=_SharedDevice):
    """Replaces torch's class of this name."""


@cache
def _devices(_process: int) -> list[Any]:
    """The devices that torch would open for each group. A forked process needs its own: threads are not inherited.

    A fork also keeps its parent's devices: destroying one would wait for a thread that the fork does not have.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [_ORIGINAL.create_device(interface=name) for name in interfaces]
    return [_ORIGINAL.create_default_device()]


def share_device() -> None:
    """Let all groups that this process makes from now on share one device. Safe to call twice."""
    c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc, assignment]
