"""Groups of gloo share one thread, work as before, and a forked process opens a device of its own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from oblr_megatron.runtime import gloo
from oblr_megatron.runtime.gloo import share_device
from tests.distributed.launch import layout, run_ranks

GROUPS = 5


def loops() -> int:
    """Threads of gloo's devices in this process, at least one: a new thread gives itself its name."""
    names: list[str] = []
    until = time.monotonic() + 10
    while "gloo_tcp_loop" not in names and time.monotonic() < until:
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def several_groups() -> tuple[int, list[float], timedelta, bool]:
    """Threads, sums of every group, a group's own timeout, and whether torch takes the groups for gloo's."""
    share_device()  # the second time: the test's launcher calls it, too
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=30 + n)) for n in range(GROUPS)]
    sums = []
    for group in groups:
        values = torch.tensor(1.0 + dist.get_rank())
        dist.all_reduce(values, group=group)
        sums.append(float(values))
    dist.monitored_barrier(groups[0])  # torch refuses it for other backends
    backend = groups[2]._get_backend(torch.device("cpu"))
    recognised = isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
    return loops(), sums, backend.options._timeout, recognised and dist.get_backend(groups[1]) == "gloo"


def test_all_groups_share_one_thread() -> None:
    for threads, sums, timeout, recognised in run_ranks(several_groups, 2):
        assert threads == 1
        assert sums == [3.0] * GROUPS
        assert timeout == timedelta(seconds=32)
        assert recognised


def of_a_layout() -> int:
    """Threads after megatron-core's groups were made, without the test launcher's own call."""
    dist.distributed_c10d.ProcessGroupGloo = gloo._ORIGINAL  # type: ignore[misc]
    with layout(tp=2):
        return loops()


def test_a_layout_shares_it() -> None:
    assert run_ranks(of_a_layout, 2) == [1, 1]


def with_a_fork() -> int:
    """Threads of a forked process that makes a group of its own, on the default interface."""
    assert loops() == 1 and _get_default_group().size() == 1
    reader, writer = os.pipe()
    if os.fork() == 0:
        del os.environ["GLOO_SOCKET_IFNAME"]
        group = dist.distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
        group.barrier().wait()
        os.write(writer, bytes([loops()]))
        os._exit(0)
    return os.read(reader, 1)[0]


def test_a_fork_opens_its_own_device() -> None:
    assert run_ranks(with_a_fork, 1) == [1]
