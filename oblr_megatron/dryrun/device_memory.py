"""What a rank's device holds: while the trainer computes and its engine sleeps, and while the engine samples.

found = rank_memory(hf_config, config, world_size, device)
found[0].training, found[0].rollout, found[0].peak        # of a rank of the first pipeline stage, bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.config import Config
from oblr_megatron.memory.engine import EngineMemory, engine_bytes
from oblr_megatron.memory.training import MemoryEstimate, estimate_stage, resident_bytes

CONTEXT = 2 * 2**30  # CUDA context, NCCL and cuBLAS of a trainer rank: usual, not yet measured on a GPU


@dataclass(frozen=True, slots=True)
class Device:
    """What ranks run on. Example: Device(on_gpu=True, num_bytes=80_000_000_000, transformer_engine=True)"""

    on_gpu: bool
    num_bytes: int | None  # memory a rank may take; None: unknown
    transformer_engine: bool

    @property
    def text(self) -> str:
        """For one line, e.g. "a GPU of 80 GB with Transformer Engine's layers"."""
        if not self.on_gpu:
            return "a CPU"
        layers = "Transformer Engine's" if self.transformer_engine else "megatron-core's own"
        return f"a GPU of {(self.num_bytes or 0) / 1e9:.3g} GB with {layers} layers"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's. Example: RankMemory(MemoryEstimate(...), EngineMemory(...), sleep_level=2, context=2**31)"""

    step: MemoryEstimate
    engine: EngineMemory | None  # that shares the rank's device
    sleep_level: int
    context: int  # of the trainer's process

    @property
    def training(self) -> int:
        """At the fullest moment of a step."""
        return self.step.total + self.context + (self.engine.asleep(self.sleep_level) if self.engine else 0)

    @property
    def rollout(self) -> int:
        """While samples are made: what the trainer keeps between steps, and the engine awake."""
        return self.step.between_steps + self.context + (self.engine.total if self.engine else 0)

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.training, self.rollout)

    def parts(self) -> dict[str, int]:
        """All of it by name, bytes."""
        found = {name: num_bytes for name, num_bytes in self.step.rows() if num_bytes}
        found["trainer's context"] = self.context
        if self.engine:
            found["engine asleep"] = self.engine.asleep(self.sleep_level)
            found["kept between steps"] = self.step.between_steps
            found |= {"engine's weights": self.engine.weights, "engine's other": self.engine.other}
            found["KV cache"] = self.engine.kv_cache
        return found


def rank_memory(hf_config: Mapping[str, Any], config: Config, world_size: int, device: Device) -> list[RankMemory]:
    """Of a rank of each pipeline stage.

    Args:
        hf_config: the model's config.json.
        config: the run, its `gradnorm.mode` decided.
        world_size: its ranks.
        device: what each runs on.
    """
    engine = None
    if config.rollout.own_engines:
        engine = engine_bytes(hf_config, config, device_bytes=device.num_bytes if device.on_gpu else None)
    fixed = 0 if device.on_gpu else resident_bytes()
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
            ),
            engine,
            config.rollout.sleep_level if device.on_gpu else 0,
            CONTEXT if device.on_gpu else 0,
        )
        for stage in range(config.parallel.pipeline_model_parallel_size)
    ]
