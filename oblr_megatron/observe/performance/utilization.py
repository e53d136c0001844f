"""Device utilization of a step: MFU of the training, and throughput.

    perf/mfu/actor       training FLOPs of the samples with a gradient / (T * ranks * peak)
    perf/mfu/with_norms  the same, with the FLOPs of a separate pass for the norms, if there is one
    perf/throughput      prompt and response tokens / (step time without evaluation * ranks)

T is the time of the gradnorm, gradient and optimizer phases; docs/performance.md compares with verl's definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oblr_megatron.algo.baseline import active_groups
from oblr_megatron.observe.performance.flops import training_flops
from oblr_megatron.observe.performance.hardware import Device

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.types import Sample, Scored

TRAINING = ("gradnorm", "gradient", "optimizer")


@dataclass(frozen=True, slots=True)
class Utilization:
    """Computes the utilization metrics of a run's steps.

    Example: Utilization(hf_config, config, world_size=8, peak_flops=peak_flops(config, this_device()))
    """

    hf_config: Mapping[str, Any]
    config: Config
    world_size: int
    peak_flops: float | None  # FLOP/s of one device in the training precision; None: unknown, no MFU is logged

    def metrics(self, samples: Sequence[Sample], scored: Scored, timing: Mapping[str, float]) -> dict[str, float]:
        """The perf/ metrics of one step.

        Args:
            samples: [Q * G], prompt-major.
            scored: their rewards [Q, G].
            timing: "timing_s/<phase>" of the step, and "timing_s/step".
        """
        tokens = sum(sample.num_tokens for sample in samples)
        metrics = {"perf/throughput": tokens / (working_s(timing) * self.world_size)}
        seconds = sum(timing.get(f"timing_s/{phase}", 0.0) for phase in TRAINING)
        if self.peak_flops is None or not seconds:
            return metrics
        frozen = self.config.model.lora.rank > 0
        flops = training_flops(self.hf_config, self._trained(samples, scored), frozen=frozen)
        flops *= self.config.algo.keep  # on average
        metrics["perf/mfu/actor"] = flops / (seconds * self.world_size * self.peak_flops)
        metrics["perf/mfu/with_norms"] = metrics["perf/mfu/actor"] * (1 + self._norms_apart)
        return metrics

    def _trained(self, samples: Sequence[Sample], scored: Scored) -> list[int]:
        """Input tokens of the samples that went through a backward pass."""
        if self.config.algo.kl_coefficient:  # the penalty has a gradient even where the advantage is 0
            return [sample.num_inputs for sample in samples]
        active = active_groups(self.config.algo.baseline, scored.rewards).tolist()
        group = scored.rewards.shape[1]
        return [sample.num_inputs for n, sample in enumerate(samples) if active[n // group]]

    @property
    def _norms_apart(self) -> float:
        """Share of the samples that take a separate forward and backward pass for their norms."""
        options = self.config.gradnorm
        apart = self.config.measures_norms and options.mode not in ("inline", "stash", "bookkeep")
        return options.sample_fraction if apart else 0.0


def peak_flops(config: Config, device: Device | None) -> float | None:
    """FLOP/s of one device in the training precision; None if unknown."""
    if device is None or config.model.dtype != "bfloat16":
        return None
    tflops = device.bf16_tflops if config.model.fp8 == "none" else device.fp8_tflops
    return None if tflops is None else tflops * 1e12


def working_s(timing: Mapping[str, float]) -> float:
    """Seconds of a step without its evaluation."""
    return max(timing["timing_s/step"] - timing.get("timing_s/evaluate", 0.0), 1e-9)
