"""Records of the planner: requests, settings, phases, predictions. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.config import Config, parse_config
from oblr_megatron.extras.planner.constants import PlannerMachine
from oblr_megatron.extras.planner.stage import Terms
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.observe.performance.flops import training_flops


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Example: `oblr-megatron plan --model Qwen3-8B --gpus 64 --sequence-length 8192`."""

    model: str
    hf_config: Mapping[str, Any]
    gpus: int  # the trainer's
    machine: PlannerMachine
    mean_response_tokens: int  # every prompt counts as the longest
    table: Mapping[str, Any]  # the rest of the run, as in a config file
    engine_gpus: int = 0  # that only sample; 0: engines share the trainer's
    speculation_acceptance: float = 0.0  # see `Setting`

    def config(self, layout: Mapping[str, Any]) -> Config:
        """The run with the sections of a layout.

        Raises:
            UserError: fields contradict each other.
        """
        sections = {
            name: {**self.table.get(name, {}), **fields} if isinstance(fields, Mapping) else fields
            for name, fields in layout.items()
        }
        return parse_config({**self.table, **sections}, "plan")


def base_table(
    *, model: str, prompts: int, group_size: int, prompt_tokens: int, sequence_length: int, dtype: str
) -> dict[str, Any]:
    """A run with these sizes and defaults otherwise."""
    return {
        "run_dir": "runs/plan",
        "num_prompts": prompts,
        "group_size": group_size,
        "model": {"path": model, "dtype": dtype},
        "data": {"train": "train.jsonl", "max_prompt_tokens": prompt_tokens},
        "rollout": {"max_response_tokens": sequence_length - prompt_tokens},
    }


@dataclass(frozen=True, slots=True)
class Setting:
    """A run on a machine.

    Example: Setting(published("Qwen3-8B"), config, 64, PlannerMachine(device_named("h100")), mean_response_tokens=2048)
    """

    hf_config: Mapping[str, Any]
    config: Config  # with gradnorm.mode chosen; "auto" counts as "two_pass"
    world_size: int
    machine: PlannerMachine
    mean_response_tokens: int | None = None  # by default rollout.max_response_tokens
    transformer_engine: bool = False
    engine_gpus: int = 0  # GPUs that only sample; 0: engines share the trainer's
    speculation_acceptance: float = 0.0  # chance that a draft token is right, in the tail; 0: no speculation

    @property
    def typical(self) -> Config:
        """The run with its longest response set to the mean response."""
        config = self.config
        response = self.mean_response_tokens or config.rollout.max_response_tokens
        rollout = config.rollout.model_copy(update={"max_response_tokens": response})
        return config.model_copy(update={"rollout": rollout})

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

    setting: Setting
    phases: dict[str, Phase]
    hidden: float = 0.0  # seconds of phases that run at the same time as others

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(phase.seconds for phase in self.phases.values()) - self.hidden

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device, over the whole step."""
        return self.setting.tokens / self.seconds / (self.setting.world_size + self.setting.engine_gpus)

    @property
    def mfu(self) -> float:
        """FLOPs of a plain gradient of all samples over the trainer's peak during norms, gradient and optimizer."""
        setting = self.setting
        frozen = setting.config.model.lora.rank > 0
        flops = training_flops(setting.hf_config, [longest_sample(setting.typical)], frozen=frozen) * setting.samples
        peak = setting.machine.peak_flops(fp8=setting.config.model.fp8 != "none")
        training = sum(self.phases[name].seconds for name in ("norms", "gradient", "optimizer"))
        return flops / (training * setting.world_size * peak)

    @property
    def bound_by(self) -> str:
        """The largest term of the longest phase, e.g. "gradient: products"."""
        name = max(self.phases, key=lambda each: self.phases[each].seconds)
        return f"{name}: {self.phases[name].bound_by}"
