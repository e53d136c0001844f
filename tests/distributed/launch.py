"""Run a function on several gloo ranks, each a process of its own, under a deadline.

    results = run_ranks(logits_of_all_layouts, 4, path)      # [rank 0's result, rank 1's, ...]

The processes are forked from a server that has torch, megatron-core, transformers and the trainer imported
(preload.py), so a launch costs a fraction of a second instead of the seconds of these imports.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from torch import Tensor

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.parallel import Parallel

Result = TypeVar("Result")
PRELOAD = ["tests.distributed.preload"]


class RankError(AssertionError):
    """A rank raised, died or missed the deadline; the message has its traceback."""


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    deadline_s: float = 600.0,
    first: Callable[[], None] | None = None,
) -> list[Result]:
    """Call `function(*args)` on every rank, inside a gloo process group; both must be picklable by name.

    Args:
        function: for every rank.
        world_size: number of ranks.
        args: of `function`.
        deadline_s: for all ranks.
        first: each rank calls it before its first thread starts.

    Raises:
        RankError: the first rank that failed, with its traceback. The other ranks are killed, as at the deadline.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # A FileStore polls every 10 ms, and megatron-core makes tens of groups in each layout.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, readers = [], []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(writer, function, args, rank, world_size, store.port, deadline_s, first),
            daemon=True,
        )
        process.start()
        writer.close()  # so that the reader sees the end when the rank dies
        processes.append(process)
        readers.append(reader)
    try:
        return _collect(readers, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def layout(
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    cp: int = 1,
    vp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
) -> Iterator[Parallel]:
    """Make a layout from all ranks and drop it at the end; the remaining ranks are data parallel."""
    import torch.distributed as dist

    from oblr_megatron.model.parallel import initialize, shutdown

    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=sp,
        distributed_timeout_s=120,
    )
    yield initialize(config)
    dist.barrier()  # a rank that leaves early closes connections that a slower one is still making
    shutdown(keep_process_group=True)


def _collect(readers: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(readers)) if rank not in results]
            raise RankError(f"ranks {missing} did not answer before the deadline")
        for reader in ready:
            rank = readers.index(reader)
            results[rank] = _receive(reader, rank)
    return [results[rank] for rank in range(len(readers))]


def _receive(reader: Connection, rank: int) -> Any:
    try:
        succeeded, value = pickle.loads(reader.recv_bytes())
    except EOFError:
        raise RankError(f"rank {rank} died without a word") from None
    if not succeeded:
        raise RankError(f"rank {rank} failed:\n{value}")
    return value


def _rank_main(
    writer: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    deadline_s: float,
    first: Callable[[], None] | None,
) -> None:
    if first is not None:
        first()
    import torch
    import torch.distributed as dist

    from oblr_megatron.runtime.gloo import share_device

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    _share_cores(rank, world_size)
    share_device()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
        )
        answer = (True, function(*args))
    except BaseException:  # noqa: BLE001  whatever it was, the test must see it
        answer = (False, traceback.format_exc())
    # Plain bytes: torch's own way of sending tensors needs this process to live until they are read.
    data = io.BytesIO()
    _ToHost(data).dump(answer)
    writer.send_bytes(data.getvalue())
    writer.close()


class _ToHost(pickle.Pickler):
    """Tensors of a GPU arrive in host memory, where the tests compare them."""

    def reducer_override(self, value: Any) -> Any:
        on_gpu = isinstance(value, Tensor) and value.is_cuda
        return value.cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if on_gpu else NotImplemented


def _share_cores(rank: int, world_size: int) -> None:
    """Pin each rank to a core if there are more ranks than cores: otherwise gloo's threads take half of all time.

    Seen with 4 ranks on 2 cores: a small all-reduce took 5.0 to 5.9 ms, pinned 3.3 to 4.0 ms.

    SCHED_BATCH is not used. It saved a fifth of the CPU time in one run of four files. But next to two busy processes
    an all-reduce of 2 ranks then took 13 ms instead of 1.2.
    """
    cores = sorted(os.sched_getaffinity(0))
    if world_size > len(cores):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
