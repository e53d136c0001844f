"""Memory that CUDA and a sleeping engine keep, and the seconds of sleep, wake and push."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ParallelConfig, parse_config
from oblr_megatron.memory.training import resident_bytes
from oblr_megatron.model.parallel import initialize
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights.export import MegatronWeights
from tests.tiny import make_hf_dir
from tools.gpu_test.report import Report
from tools.make_smoke_model import SAMPLE_TEXTS, make_model

GIB = 2**30


def used_bytes() -> int:
    """Memory of this process's first GPU that any process uses.

    It is this process's resident memory if nvidia-smi does not say. No context is made by asking, so that the first
    call can be a baseline.
    """
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", index]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return resident_bytes()
    used = found.partition("\n")[0].strip()
    return int(used) * 2**20 if used.isdecimal() else resident_bytes()  # [N/A] where memory is the processor's


def context(report: Report, side: int = 4096) -> None:
    """What a rank takes beyond torch's allocator: CUDA's context, cuBLAS, NCCL with one rank."""
    before = used_bytes()
    parallel = initialize(ParallelConfig())
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(side, side, device=parallel.device, dtype=dtype)
        dist.all_reduce(square @ square)
    report.put("GiB of a rank's context", (used_bytes() - before - _reserved()) / GIB)


def _reserved() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


def sleeping(
    report: Report, *, tiny: bool = False, dtype: str = "bfloat16", share: float = 0.4, cycles: int = 20
) -> None:
    """An engine on the trainer's GPU sleeps and wakes at both levels; the samples of all cycles should be equal."""
    before = used_bytes()
    parallel = initialize(ParallelConfig())
    torch.ones(1, device=parallel.device)
    trainer = used_bytes() - before - _reserved()
    report.put("GiB of the trainer's context", trainer / GIB)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        if tiny:
            make_hf_dir(model, head_dim=64)
        else:
            make_model(model, dtype=dtype, texts=SAMPLE_TEXTS, seed=0)
        config = parse_config(
            {
                "run_dir": f"{name}/run",
                "model": {"path": str(model), "dtype": dtype},
                "data": {"train": "unused", "max_prompt_tokens": 24},
                "rollout": {
                    "max_response_tokens": 40,
                    "kv_cache_gib": 0.1,
                    "num_threads": 1,
                    "gpu_memory_utilization": share,
                },
            }
        )
        owner: Any = SimpleNamespace(rank=0, world_size=1, device=parallel.device)
        begin = time.perf_counter()
        engines = ColocatedEngines(config, owner)
        try:
            policy = build_policy(AutoConfig.from_pretrained(model), config.model, parallel, config.parallel)
            load_hf_weights(policy, model)
            source = MegatronWeights(policy)
            engines.push(source, version=1)
            report.put("seconds to start", time.perf_counter() - begin)
            for level in (1, 2):
                _cycles(report, engines, source, level, cycles, before + trainer)
        finally:
            engines.close()


def _cycles(report: Report, engines: ColocatedEngines, source: Any, level: int, cycles: int, others: int) -> None:
    """Sleep, push and sample `cycles` times at one level; the largest of each figure."""
    from tests.e2e.tiny_rollout import sample  # needs psutil, which only comes with vLLM

    wanted = [one.response_ids for one in sample(engines)]
    report.put("GiB of the engine awake", (used_bytes() - others - _reserved()) / GIB)
    different, asleep, sleep_s, wake_s, speed = 0, 0, 0.0, 0.0, 0.0
    for cycle in range(cycles):
        begin = time.perf_counter()
        engines.sleep(level)
        sleep_s = max(sleep_s, time.perf_counter() - begin)
        asleep = max(asleep, used_bytes() - others - _reserved())
        begin = time.perf_counter()
        stats = engines.push(source, version=level * cycles + cycle + 2)  # always a higher one
        engines.wake()
        wake_s = max(wake_s, time.perf_counter() - begin)
        speed = max(speed, stats.bytes / stats.seconds / 1e9)
        different += [one.response_ids for one in sample(engines)] != wanted
        report.put(f"GiB of the engine asleep, level {level}", asleep / GIB)
        report.put(f"seconds to sleep, level {level}", sleep_s)
        report.put(f"seconds to push and wake, level {level}", wake_s)
        report.put(f"GB/s of a push, level {level}", speed)
        report.put(f"cycles with other samples, level {level}", different)
