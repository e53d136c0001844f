"""Predicted seconds of sampling and of the weight push. Imports no torch.

A decoding step reads weights and KV cache, and computes. Measured steps take the sum of both, not the longer one. Of E
experts with k per token, a step of B tokens reads E (1 - (1 - k / E)^B). With `speculation_acceptance` p, a step of the
longest response computes d + 1 tokens and gains 1 + p + ... + p^d of them, for drafts of d tokens ("ngram"), if that is
faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oblr_megatron.config import Config
from oblr_megatron.extension import extension
from oblr_megatron.extras.planner.exchange import Links
from oblr_megatron.extras.planner.setting import Phase
from oblr_megatron.extras.planner.stage import scaled
from oblr_megatron.memory.engine import EngineMemory, engine_bytes, engine_sizes
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.observe.performance.flops import active_parameters, forward_flops, total_parameters

if TYPE_CHECKING:
    from oblr_megatron.extras.planner.setting import Setting
    from oblr_megatron.extras.planner.stage import Terms
    from oblr_megatron.memory.rank_shapes import RankSizes

PUSH_COPIES = 2  # into a bucket and out of it; each reads and writes
LONGEST = "longest response"
"""Term of the rollout phase after the full batch."""


def rollout_phase(setting: Setting) -> Phase:
    """Sampling of a step's responses."""
    return Phase(_Engine.of(setting).terms())


def push_phase(setting: Setting) -> Phase:
    """The weight push to the engines."""
    machine, config = setting.machine, setting.config
    sizes = engine_sizes(setting.hf_config, config)
    num_bytes = total_parameters(setting.hf_config) * sizes.element
    links = Links.of(machine, config.parallel, setting.world_size)
    memory = machine.device.memory_gb_s * 1e9 * machine.constants.memory
    stretch = machine.stretch(setting.world_size)
    return Phase(
        {
            "gather": links.model(num_bytes) * stretch,
            "network": links.between_nodes(num_bytes) if setting.engine_gpus else 0.0,
            "memory": 2 * PUSH_COPIES * num_bytes / config.rollout.tensor_parallel_size / memory * stretch,
            "fixed": machine.constants.step_s,
        }
    )


@dataclass(frozen=True, slots=True)
class _Engine:
    """One vLLM engine and its share of a step."""

    setting: Setting
    config: Config  # `setting.typical`
    sizes: RankSizes
    memory: EngineMemory
    sequences: float

    @classmethod
    def of(cls, setting: Setting) -> _Engine:
        config, device = setting.config, setting.machine.device
        on_gpu = setting.machine.on_gpu
        engines = config.rollout.num_engines
        if engines is None:
            gpus = setting.engine_gpus or setting.world_size
            engines = gpus // config.rollout.tensor_parallel_size if on_gpu else 1
        memory = engine_bytes(setting.hf_config, config, device_bytes=device.memory_bytes if on_gpu else None)
        sizes = engine_sizes(setting.hf_config, config)
        return cls(setting, setting.typical, sizes, memory, setting.samples / engines)

    @property
    def batch(self) -> float:
        """B, the sequences decoded at once."""
        fit = self.memory.kv_tokens / longest_sample(self.config)
        return max(1.0, min(self.sequences, self.setting.config.rollout.max_num_seqs, fit))

    def terms(self) -> Terms:
        """Seconds of the engine's share of a step."""
        mean = self.config.rollout.max_response_tokens
        waves = max(1.0, self.sequences / self.batch)
        rest = max(0.0, self.setting.config.rollout.max_response_tokens - waves * mean)
        constants = self.setting.machine.constants
        decode = {name: waves * mean * seconds for name, seconds in self.step(self.batch).items()}
        decode |= {LONGEST: rest * self.next_token()}
        return {"prefill": self.prefill(), **scaled(decode, constants.rollout), "fixed": constants.step_s}

    def next_token(self) -> float:
        """Seconds until a response that is decoded by itself is one token longer."""
        alone, chance = sum(self.step(1.0).values()), self.setting.speculation_acceptance
        if not chance:
            return alone
        drafts = extension("rollout.speculation").OPTIONS["ngram"]["num_speculative_tokens"]
        gained = sum(chance**accepted for accepted in range(drafts + 1))
        return min(alone, sum(self.step(1.0, 1 + drafts).values()) / gained)

    def step(self, batch: float, tokens: int = 1) -> Terms:
        """Seconds of one decoding step of `batch` sequences that computes `tokens` tokens of each."""
        device, constants = self.setting.machine.device, self.setting.machine.constants
        half = longest_sample(self.config) - self.config.rollout.max_response_tokens / 2  # cached tokens, on average
        bandwidth = device.memory_gb_s * 1e9 * constants.decode
        weights = self.weights_read(batch * tokens) / bandwidth
        cache = batch * half * self.memory.kv_bytes_per_token / bandwidth
        products = batch * tokens * 2 * active_parameters(self.setting.hf_config) / self.sizes.tp / self.peak()
        hidden = batch * tokens * self.sizes.hidden * self.sizes.element
        reduced = 4 * self.sizes.layers * self.links.tensor(hidden)
        read = {"weights read": weights, "KV cache read": cache}
        return {**read, "products": products, "tensor": reduced, "scheduler": constants.decode_step_s}

    def weights_read(self, batch: float) -> float:
        """Bytes of weights that one device reads for `batch` tokens."""
        sizes = self.sizes
        if not sizes.experts:
            return self.memory.weights
        experts = sizes.expert_parameters / sizes.parameters * self.memory.weights
        touched = 1 - (1 - sizes.top_k / sizes.experts) ** batch
        return self.memory.weights - experts * (1 - touched)

    def prefill(self) -> float:
        """Seconds to prefill each group's prompt once."""
        prompt = longest_sample(self.config) - self.config.rollout.max_response_tokens
        groups = self.sequences / self.setting.config.group_size
        flops = groups * forward_flops(self.setting.hf_config, [prompt], head=False)
        return flops / self.sizes.tp / (self.peak() * self.setting.machine.constants.prefill)

    def peak(self) -> float:
        """Peak FLOP/s of one device, or of all cores of a CPU."""
        machine = self.setting.machine
        return machine.peak_flops(fp8=self.config.rollout.quantization == "fp8") * (machine.cores or 1)

    @property
    def links(self) -> Links:
        """The links among the engine's devices."""
        return Links(self.setting.machine, tp=self.sizes.tp, cp=1, dp=1, pp=1, ep=1, etp=1)
