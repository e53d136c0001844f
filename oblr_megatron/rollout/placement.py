"""Decides which rank owns each engine, which prompts it samples, and the settings of its process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.errors import UserError
from oblr_megatron.weights.adapter import AdapterShape

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Placement:
    """The owners of the engines.

    Example, 8 GPUs with tensor_parallel_size 4: Placement(owners=(0, 4), width=4)
    """

    owners: tuple[int, ...]  # rank that owns engine 0, 1, ...
    width: int  # devices of one engine

    def engine_of(self, rank: int) -> int | None:
        """The engine that a rank owns, or None."""
        return self.owners.index(rank) if rank in self.owners else None

    def share(self, count: int, engine: int) -> slice:
        """The prompts of a call that an engine samples: contiguous, with sizes that differ by at most one."""
        engines = len(self.owners)
        return slice(count * engine // engines, count * (engine + 1) // engines)


def place(config: Config, world_size: int, per_node: int, *, on_gpu: bool) -> Placement:
    """Spread the engines over `world_size` ranks, `per_node` of them on each node.

    Raises:
        UserError: there are too many engines, or too few on GPUs; they are too wide, or one crosses nodes.
    """
    rollout, where = config.rollout, "config: rollout"
    if not on_gpu and rollout.tensor_parallel_size > 1:
        what = f"tensor_parallel_size {rollout.tensor_parallel_size} needs GPUs"
        fix = "set rollout.tensor_parallel_size to 1; a CPU engine uses rollout.num_threads cores"
        raise UserError(what, where=where, fix=fix)
    if on_gpu and rollout.overlap != "none" and rollout.takes_turns:
        what = (
            f"rollout.overlap {rollout.overlap!r} computes gradients while engines sample, but with "
            f"rollout.sleep_level {rollout.sleep_level} engines on the trainer's GPUs sleep meanwhile"
        )
        fix = "use engines of their own (rollout.servers), or set rollout.sleep_level to 0 if both fit in memory"
        raise UserError(what, where=where, fix=fix)
    width = rollout.tensor_parallel_size
    engines = rollout.engines(world_size, on_gpu=on_gpu)
    if not 1 <= engines <= world_size // width:
        several = f"{engines} engine{'s' if engines > 1 else ''} of {width} rank{'s' if width > 1 else ''}"
        fix = f"lower num_engines or tensor_parallel_size, or start {max(engines, 1) * width} ranks"
        raise UserError(f"{several} do not fit {world_size} ranks", where=where, fix=fix)
    if on_gpu and engines * width < world_size:
        # Each push would leave a buffer on a GPU without an engine: CUDA frees shared memory only after it was opened.
        several = f"{engines} engine{'s' if engines > 1 else ''} of {width} GPU{'s' if width > 1 else ''}"
        fix = "leave num_engines out, and choose a tensor_parallel_size that divides the number of GPUs"
        raise UserError(f"{several} leave some of the {world_size} GPUs without one", where=where, fix=fix)
    owners = tuple(engine * width for engine in range(engines))
    crossing = next((owner for owner in owners if owner % per_node + width > per_node), None)
    if crossing is not None:
        ranks = f"ranks {crossing} to {crossing + width - 1}"
        what = f"rollout.tensor_parallel_size {width} puts an engine on {ranks}, but a node has {per_node} ranks"
        fix = f"choose a divisor of {per_node}; an engine's devices must be on one node"
        raise UserError(what, where=where, fix=fix)
    return Placement(owners, width)


def engine_spec(config: Config, parallel: Parallel, index: int, placement: Placement) -> EngineSpec:
    """The settings of an engine process of this run."""
    rollout = config.rollout
    on_gpu = parallel.device.type == "cuda"
    return EngineSpec(
        name=f"engine {index}",
        model=config.model.path.absolute(),
        dtype="bfloat16" if engine_dtype(config) is torch.bfloat16 else "float32",
        device="cuda" if on_gpu else "cpu",
        max_model_len=max_model_len(config),
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=int(rollout.kv_cache_gib * 2**30),
        num_threads=rollout.num_threads or max(1, len(os.sched_getaffinity(0)) // len(placement.owners)),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=placement.width,
        quantization=rollout.quantization,
        head_dtype=config.model.head_dtype,
        batch_invariant=config.model.batch_invariant,
        visible_devices=_visible_devices(parallel.device.index or 0, placement.width) if on_gpu else None,
        sleep_mode=on_gpu and rollout.sleep_level > 0,
        speculation=rollout.speculation,
        speculation_below=rollout.speculation_below,
        routes=config.model.moe_routing_replay,
        vllm=rollout.vllm,
    )


def adapter_shape(config: Config) -> AdapterShape | None:
    """The adapters that are pushed into the engines; None if pushes hold all weights."""
    lora = config.model.lora
    return AdapterShape(lora.rank, lora.targets) if lora.rank and config.rollout.lora == "adapter" else None


def engine_dtype(config: Config) -> torch.dtype:
    """Dtype of the engine's weights and of pushes: rollout.dtype, or by default the trainer's."""
    return torch.bfloat16 if config.engine_dtype == "bfloat16" else torch.float32


def _visible_devices(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine on `count` devices, starting with the trainer's device number `first`."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = devices.split(",") if devices else [str(number) for number in range(first + count)]
    return ",".join(numbers[first : first + count])
