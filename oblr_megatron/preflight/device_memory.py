"""Memory of a rank's device during training, while its engine sleeps, and during sampling. Imports no torch.

memory = rank_memory(hf_config, config, world_size, device)
memory[0].training, memory[0].rollout, memory[0].peak     # bytes of a rank of the first pipeline stage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from math import ceil
from typing import Any

from oblr_megatron.config import Config
from oblr_megatron.memory.engine import EngineMemory, device_bytes_held, engine_bytes, engines_of_a_rank, push_bytes
from oblr_megatron.memory.training import MemoryEstimate, estimate_stage, resident_bytes


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of a rank. Example: RankDevice(on_gpu=True, num_bytes=80_000_000_000, transformer_engine=True)"""

    on_gpu: bool
    num_bytes: int | None  # memory that a rank may use; None: unknown
    transformer_engine: bool

    @property
    def text(self) -> str:
        """Description, e.g. "a GPU of 80 GB with Transformer Engine's layers"."""
        if not self.on_gpu:
            return "a CPU"
        layers = "Transformer Engine's" if self.transformer_engine else "megatron-core's own"
        return f"a GPU of {(self.num_bytes or 0) / 1e9:.3g} GB with {layers} layers"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank. Example: RankMemory(MemoryEstimate(...), EngineMemory(...), sleep_level=2, context=2**31)"""

    step: MemoryEstimate
    engine: EngineMemory | None  # the engine on the same device; on a CPU one of the run's engines
    sleep_level: int
    context: int  # CUDA context of the trainer process
    push: int = 0  # buffers of a push to the engine on the same GPU
    engines: Fraction = Fraction(1)  # that count for the rank: on CPUs ranks share a machine's memory with engines

    @property
    def training(self) -> int:
        """Bytes at the peak of a step."""
        asleep = self.engine.asleep(self.sleep_level) if self.engine else 0
        return self.step.total + self.context + self._part(asleep)

    @property
    def rollout(self) -> int:
        """Bytes during sampling, or a push into a restarted engine: what the trainer keeps, the engine, the buffers."""
        awake = self.engine.total if self.engine else 0
        return self.step.between_steps + self.context + self.push + self._part(awake)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.training, self.rollout)

    def parts(self) -> dict[str, int]:
        """Bytes of each part."""
        parts = {name: num_bytes for name, num_bytes in self.step.rows() if num_bytes}
        parts["trainer's context"] = self.context
        if self.engine:
            parts["engine asleep"] = self._part(self.engine.asleep(self.sleep_level))
            parts["kept between steps"] = self.step.between_steps
            parts["engine's weights"] = self._part(self.engine.weights)
            parts["engine's other"] = self._part(self.engine.other)
            parts["KV cache"] = self._part(self.engine.kv_cache)
            parts |= {"push buffers": self.push} if self.push else {}
        return parts

    def _part(self, of_engine: int) -> int:
        """Bytes of an engine that count for the rank."""
        return ceil(of_engine * self.engines)


def rank_memory(hf_config: Mapping[str, Any], config: Config, world_size: int, device: RankDevice) -> list[RankMemory]:
    """Memory of one rank of each pipeline stage, for a config with its `gradnorm.mode` chosen."""
    engine = None
    if config.rollout.own_engines:
        engine = engine_bytes(hf_config, config, device_bytes=device.num_bytes if device.on_gpu else None)
    fixed = 0 if device.on_gpu else resident_bytes()
    trains = not config.rollout.only
    return [
        RankMemory(
            estimate_stage(
                hf_config,
                config,
                world_size,
                stage,
                on_gpu=device.on_gpu,
                transformer_engine=device.transformer_engine,
                fixed_bytes=fixed,
            )
            if trains
            else _without_a_model(fixed, stage),
            engine,
            config.rollout.sleep_level if device.on_gpu else 0,
            device_bytes_held(hf_config, config, on_gpu=device.on_gpu),
            push_bytes(hf_config, config) if device.on_gpu and engine and trains else 0,
            engines_of_a_rank(config, world_size, on_gpu=device.on_gpu),
        )
        for stage in range(config.parallel.pipeline_model_parallel_size)
    ]


def _without_a_model(fixed: int, stage: int) -> MemoryEstimate:
    """The trainer's part with `rollout.only`, which builds no policy and no optimizer: the process alone."""
    nothing: dict[str, Any] = {field.name: 0 for field in fields(MemoryEstimate)}
    return MemoryEstimate(**nothing | {"fixed": fixed, "stage": stage, "moment": "", "between_steps": fixed})
