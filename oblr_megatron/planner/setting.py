"""Records of the planner: settings, phases, predictions. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.config import Config
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.observe.performance.flops import training_flops
from oblr_megatron.planner.constants import Machine
from oblr_megatron.planner.stage import Terms


@dataclass(frozen=True, slots=True)
class Setting:
    """A run on a machine.

    Example: Setting(published("Qwen3-8B"), config, 64, Machine(device_named("h100")), mean_response_tokens=2048)
    """

    hf_config: Mapping[str, Any]
    config: Config  # with gradnorm.mode chosen; "auto" counts as "two_pass"
    world_size: int
    machine: Machine
    prompt_tokens: int | None = None  # mean; by default data.max_prompt_tokens
    mean_response_tokens: int | None = None  # by default rollout.max_response_tokens
    transformer_engine: bool = False
    engine_gpus: int = 0  # GPUs that only sample; 0: engines share the trainer's
    speculation_acceptance: float = 0.0  # chance that a draft token is right, in the tail; 0: no speculation

    @property
    def sampling_gpus(self) -> int:
        """GPUs that sample."""
        return self.engine_gpus or self.world_size

    @property
    def typical(self) -> Config:
        """The run with its maximum lengths set to the mean lengths."""
        config = self.config
        prompt = self.prompt_tokens or config.data.max_prompt_tokens
        response = self.mean_response_tokens or config.rollout.max_response_tokens
        return config.model_copy(
            update={
                "data": config.data.model_copy(update={"max_prompt_tokens": prompt}),
                "rollout": config.rollout.model_copy(update={"max_response_tokens": response}),
            }
        )

    @property
    def samples(self) -> int:
        """Responses per step."""
        return self.config.num_prompts * self.config.group_size

    @property
    def tokens(self) -> int:
        """Tokens of all samples of a step."""
        return self.samples * longest_sample(self.typical)


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of one phase by term. Example: Phase({"products": 3.1, "tensor": 0.4, "pipeline": 0.8})."""

    terms: Terms

    @property
    def seconds(self) -> float:
        """Sum of all terms."""
        return sum(self.terms.values())

    @property
    def bound_by(self) -> str:
        """Name of the largest term."""
        return max(self.terms, key=self.terms.__getitem__) if self.terms else "nothing"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step, with its phases in order."""

    phases: dict[str, Phase]
    tokens: int  # of all samples
    model_flops: float  # of a plain gradient of all samples
    devices: int  # of the trainer
    peak_flops: float  # per device, 1/s
    engine_devices: int = 0  # GPUs that only sample
    hidden: float = 0.0  # seconds of phases that run at the same time as others

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(phase.seconds for phase in self.phases.values()) - self.hidden

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device, over the whole step."""
        return self.tokens / self.seconds / (self.devices + self.engine_devices)

    @property
    def mfu(self) -> float:
        """Model FLOPs of the gradient over the trainer's peak during norms, gradient and optimizer."""
        training = sum(self.phases[name].seconds for name in ("norms", "gradient", "optimizer"))
        return self.model_flops / (training * self.devices * self.peak_flops)

    @property
    def bound_by(self) -> str:
        """The largest term of the longest phase, e.g. "gradient: products"."""
        name = max(self.phases, key=lambda each: self.phases[each].seconds)
        return f"{name}: {self.phases[name].bound_by}"


def prediction_of(setting: Setting, phases: dict[str, Phase], hidden: float = 0.0) -> Prediction:
    """The prediction of a step from its phases, of which `hidden` seconds run at the same time as others."""
    device = setting.machine.device
    fp8 = setting.config.model.fp8 != "none" and device.fp8_tflops is not None
    flops = training_flops(setting.hf_config, [longest_sample(setting.typical)]) * setting.samples
    peak = (device.fp8_tflops if fp8 and device.fp8_tflops else device.bf16_tflops) * 1e12
    return Prediction(phases, setting.tokens, flops, setting.world_size, peak, setting.engine_gpus, hidden)
