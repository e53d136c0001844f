"""Weights from one process to another by handles of device memory (CUDA IPC), with the project's exporter.

vLLM's engine opens the same handles (torch's `reduce_tensor`); line 8b measures it. Here a second process takes its
place, so that no vLLM is needed. On a CPU the handles are those of shared memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from oblr_megatron.config import ParallelConfig
from oblr_megatron.memory.training import resident_bytes
from oblr_megatron.model.parallel import initialize
from oblr_megatron.weights.device_buffer import DeviceBuffer
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.shm import HALVES, bucket_capacity, fill_buckets, read_bucket
from oblr_megatron.weights.verify import digest
from tools.gpu_test.report import Report

ANSWER_S = 120.0


class Opened(DeviceBuffer):
    """A buffer of another process."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory.device)
        self._view = memory


def ipc(
    report: Report, layers: int = 28, vocab: int = 151_936, bucket_mib: int = 8, rounds: int = 5, checksums: bool = True
) -> None:
    """Push Qwen3-0.6B in bf16 into another process, compare digests, and see whether all memory comes back."""
    from push import random_policy

    parallel = initialize(ParallelConfig())
    with tempfile.TemporaryDirectory() as directory:
        sizes = argparse.Namespace(layers=layers, vocab=vocab)
        policy = random_policy(Path(directory), sizes, parallel, "bfloat16")
    source = MegatronWeights(policy)
    manifest = manifest_of(source)
    largest = max(spec.num_bytes for spec in manifest)  # which a bucket holds, as in `rollout.push`
    capacity = max(bucket_capacity(manifest, bucket_mib * 2**20), bucket_capacity(manifest, largest))
    before = held(parallel.device)
    buffer = DeviceBuffer(parallel.device)
    buffer.reserve(HALVES * capacity)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
    process.start()
    there.close()
    here.send(buffer.bytes)
    for checksum in (False, True)[: 1 + checksums]:
        taken = [_push(source, capacity, buffer, here, checksum=checksum) for _ in range(rounds + 1)][1:]
        speed = sum(spec.num_bytes for spec in manifest) / statistics.median(taken) / 1e9
        report.put(f"GB/s {'with' if checksum else 'without'} checksums", speed)
    here.send("digests")
    found = _answer(here)
    expected = {name: digest(tensor) for name, tensor in source}
    report.put("tensors", len(expected))
    report.put("tensors that differ", sum(found.get(name) != value for name, value in expected.items()))
    here.send(None)
    process.join(ANSWER_S)
    report.put("exit status of the receiver", str(process.exitcode))
    buffer.close()
    report.put("MB that do not come back", (held(parallel.device) - before) / 1e6)


def held(device: torch.device) -> int:
    """Bytes of tensors that this process holds: torch's allocator on a GPU, resident memory on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return resident_bytes()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


def _push(source: MegatronWeights, capacity: int, buffer: DeviceBuffer, pipe: Connection, *, checksum: bool) -> float:
    """Seconds of one push; the other side copies one bucket while this side fills the next."""
    begin, unanswered = time.perf_counter(), False
    for bucket in fill_buckets(source, capacity, buffer, checksum=checksum):
        _settled(buffer.bytes.device)
        if unanswered:
            _answer(pipe)
        pipe.send(bucket)
        unanswered = True
    _answer(pipe)
    return time.perf_counter() - begin


def _answer(pipe: Connection) -> dict[str, str]:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the receiver did not answer within {ANSWER_S:g} s")
    answer: dict[str, str] = pipe.recv()
    return answer


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def receive(pipe: Connection) -> None:
    """The other process: copies buckets into tensors of its own until it receives None."""
    buffer = Opened(pipe.recv())
    device, tensors = buffer.bytes.device, dict[str, Tensor]()
    while (message := pipe.recv()) is not None:
        if message == "digests":
            pipe.send({name: digest(tensor) for name, tensor in tensors.items()})
            continue
        for part, elements in read_bucket(message, buffer):
            spec = part.spec
            if spec.name not in tensors:
                tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
            tensors[spec.name].view(-1)[part.first : part.first + part.count].copy_(elements)
        _settled(device)
        pipe.send({})
    buffer.close()
