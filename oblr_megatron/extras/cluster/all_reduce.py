"""Checks sums and bandwidth of all-reduces: over the GPUs of each node, over those of all nodes, and by gloo.

    python -m oblr_megatron.extras.cluster.all_reduce --store HOST:PORT --node 1 --nodes 4 --local 3 --per-node 8 ...

runs one process of the measurement. There is one per GPU; they meet through the preflight's store, and each prints one
line of JSON among the lines of NCCL. The preflight calls `measure_gloo` itself, in one process per node, also on GPUs,
where a run has groups of gloo, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO

import torch
import torch.distributed as dist

from oblr_megatron.runtime.processes import python_module

GPU_BYTES, CPU_BYTES = 256 * 2**20, 2**20
WARM_UP, REPEATS = 2, 5
GRACE_S = 30.0  # added to a collective's deadline, for processes to start and end


@dataclass(frozen=True, slots=True)
class Speed:
    """Bus bandwidth in GB/s: 2 (n - 1) / n x bytes / seconds of the fastest repetition; 0 for a single process.

    Example: Speed(within_node=372.0, over_nodes=168.5)
    """

    within_node: float
    over_nodes: float


class ReduceError(RuntimeError):
    """An all-reduce failed or gave a wrong sum."""


def measure(store: dist.Store, node: int, nodes: int, local: int, per_node: int, deadline_s: float) -> Speed:
    """Run both all-reduces with NCCL, as the process of GPU `local` of `per_node` on this node; collective.

    Raises:
        ReduceError: an all-reduce failed or was wrong; names which one.
    """
    torch.cuda.set_device(local)
    within = over = 0.0
    if per_node > 1:
        within = _one("nccl", dist.PrefixStore(f"node_{node}", store), local, per_node, "within the node", deadline_s)
    if nodes > 1:
        rank = node * per_node + local
        over = _one("nccl", dist.PrefixStore("all", store), rank, nodes * per_node, "over all nodes", deadline_s)
    return Speed(within, over)


def measure_gloo(store: dist.Store, node: int, nodes: int, deadline_s: float) -> Speed:
    """Run an all-reduce with gloo in one process of each node; collective.

    Raises:
        ReduceError: it failed or was wrong.
    """
    if nodes == 1:
        return Speed(0.0, 0.0)
    return Speed(0.0, _one("gloo", dist.PrefixStore("gloo", store), node, nodes, "over all nodes", deadline_s))


def _one(backend: str, store: dist.Store, rank: int, size: int, which: str, deadline_s: float) -> float:
    """GB/s of a temporary process group."""
    limit = timedelta(seconds=deadline_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        try:
            return _reduce(rank, size, which, on_gpu=backend == "nccl")
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # torch's type for connection errors, timeouts and NCCL errors
        if isinstance(error, ReduceError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReduceError(f"{backend} all-reduce {which} ({size} processes): {reason}") from error


def _reduce(rank: int, size: int, which: str, *, on_gpu: bool) -> float:
    """GB/s of an all-reduce. Element i of process r is i % 7 + r; float32 sums are exact up to 5,000 processes."""
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    synchronize = torch.cuda.synchronize if on_gpu else torch.cpu.synchronize
    count = (GPU_BYTES if on_gpu else CPU_BYTES) // 4
    pattern = torch.arange(count, device=device) % 7
    best = float("inf")
    for _ in range(WARM_UP + REPEATS):
        tensor = (pattern + rank).float()
        synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize()
        best = min(best, time.perf_counter() - begin)
    wrong = int((tensor != (pattern * size + size * (size - 1) // 2).float()).sum())
    if wrong:
        raise ReduceError(f"all-reduce {which}: {wrong} of {count} sums are wrong on {device}")
    return 2 * (size - 1) / size * 4 * count / best / 1e9


def measure_gpus(address: str, node: int, nodes: int, per_node: int, deadline_s: float) -> tuple[Speed, list[str]]:
    """Measure with one process per GPU of this node; return the slowest GPU's speed and all failures."""
    words = {"store": address, "node": node, "nodes": nodes, "per-node": per_node, "deadline": deadline_s}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    command = [*python_module("oblr_megatron.extras.cluster.all_reduce"), *options]
    speeds, failures = [], []
    with ExitStack() as files:  # not pipes: a full one would block its process inside the collective
        outputs = [[files.enter_context(TemporaryFile()) for _ in range(2)] for _ in range(per_node)]
        tasks = [
            subprocess.Popen([*command, "--local", str(local)], stdout=stdout, stderr=stderr)
            for local, (stdout, stderr) in enumerate(outputs)
        ]
        end = time.monotonic() + 2 * deadline_s + GRACE_S
        for local, (task, written) in enumerate(zip(tasks, outputs, strict=True)):
            try:
                task.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                task.kill()
                task.wait()
            stdout, stderr = (_lines(file) for file in written)
            answers = [line for line in stdout if line.startswith("{")]  # NCCL_DEBUG=INFO prints to stdout, too
            if task.returncode or not answers:
                last = (stderr or ["no message"])[-1]
                failures.append(f"GPU {local}: the all-reduce process exited with status {task.returncode}: {last}")
            elif "error" in (answer := json.loads(answers[-1])):
                failures.append(f"GPU {local}: {answer['error']}")
            else:
                speeds.append(Speed(**answer))
    within, over = (min((getattr(one, name) for one in speeds), default=0.0) for name in ("within_node", "over_nodes"))
    return Speed(within, over), failures


def _lines(file: IO[bytes]) -> list[str]:
    """The lines that a process wrote to a file; the last one is not empty."""
    file.seek(0)
    return file.read().decode(errors="replace").rstrip().splitlines()


def main() -> int:
    """Run one process of the measurement."""
    parser = argparse.ArgumentParser(prog="oblr_megatron.extras.cluster.all_reduce")
    parser.add_argument("--store", required=True)
    for name in ("node", "nodes", "local", "per-node"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    options = parser.parse_args()
    host, _, port = options.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=options.deadline))
    try:
        answer = asdict(measure(store, options.node, options.nodes, options.local, options.per_node, options.deadline))
    except ReduceError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}", flush=True)  # on a line of its own, also after half a line of NCCL
    return 0


if __name__ == "__main__":
    sys.exit(main())
