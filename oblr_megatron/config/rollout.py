"""The configuration's sections about sampling and about the way of the weights to the engines. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class RolloutConfig(Section):
    """How responses are sampled by vLLM."""

    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature; the trainer's log-probs are those of the same distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus filter; below 1 the rollout log-probs are renormalised over the nucleus and the trainer's are not."""
    top_k: int = Field(-1, ge=-1)
    """Top-k filter, -1 for none; the same caution as for top_p."""
    max_response_tokens: int = Field(512, ge=1)
    """A response that reaches this length is cut (finish_reason "length")."""
    servers: tuple[str, ...] = ()
    """URLs of vLLM API servers that sample instead of engines of the run's own, e.g. ["http://10.0.0.5:8000"]; start
    them with `oblr-megatron serve`."""
    api_key_env: str = "OBLR_API_KEY"
    """Environment variable that holds the servers' API key."""
    num_engines: int | None = Field(None, ge=1)
    """vLLM engines; by default one for each block of tensor_parallel_size ranks on GPUs, one in all on a CPU."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one engine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the engine's weights; "auto" takes the trainer's (float64 becomes float32)."""
    quantization: Literal["none", "fp8"] = "none"
    """Weights of the engine in FP8, rounded at every push from bfloat16 (vLLM's online `fp8_per_tensor`), on GPUs;
    needs importance_sampling."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """vLLM's share of GPU memory."""
    kv_cache_gib: float = Field(0.5, gt=0)
    """KV cache of a CPU engine, GiB."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences a vLLM engine decodes at once."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of a CPU engine; by default all cores divided by the engines."""
    importance_sampling: Literal["none", "token", "sequence"] = "token"
    """Truncated importance sampling against the trainer/rollout mismatch, on token or sequence level."""
    importance_cap: float = Field(2.0, ge=1)
    """Importance ratios are cut at this value (and counted)."""
    max_staleness: int = Field(0, ge=0)
    """Weight updates by which a sample may be behind the trainer; 0 is strictly on-policy. An older one is refused."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and sample further prompts in their place. Every place of a step then has
    a gradient, at a price: which prompts a step holds depends on their responses. The gradient is no longer an estimate
    of that of the mean reward but of it divided by the share of mixed groups, which changes as if the learning rate
    did (and of another direction where equal groups have a gradient: under a prior, the batch's mean, none, or a KL
    penalty); signal, noise and the snr schedule speak of mixed groups alone (docs/samples.md)."""
    dynamic_sampling_max_batches: int = Field(4, ge=1)
    """Batches of num_prompts prompts that a step may sample for it; what is missing then is filled from the dropped."""
    sleep_level: Literal[0, 1, 2] = 2
    """What an engine on the trainer's own GPUs frees while the trainer computes: 0 nothing; 1 the KV cache, and the
    weights go to host memory; 2 the weights are dropped, since a push brings them before anything is sampled."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of an engine that died or hung, each with a full push, without a completed step in between; with one
    more the run saves its weights and ends."""
    save: bool = False
    """Write every step's samples and rewards to RUN_DIR/rollouts (`train --save-rollouts`)."""
    replay: Path | None = None
    """Directory of saved samples to train from, without vLLM (`train --replay DIR`)."""
    only: bool = False
    """Sample, judge and save num_steps batches from the unchanged model, without training (`train --rollout-only`)."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Deadline for an engine to be ready, seconds."""
    generate_timeout_s: float = Field(1800.0, gt=0)
    """Deadline for one generate call, seconds."""
    push_timeout_s: float = Field(300.0, gt=0)
    """Deadline for one weight push, seconds."""
    sleep_timeout_s: float = Field(120.0, gt=0)
    """Deadline for an engine to free its GPU memory or to take it back, seconds."""

    @property
    def own_engines(self) -> bool:
        """Whether the run starts engines itself, on the trainer's devices."""
        return self.replay is None and not self.servers

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and engines take turns with the memory of their GPUs."""
        return self.own_engines and self.sleep_level > 0


class WeightsConfig(Section):
    """How weights travel from the trainer to the engines."""

    bucket_mib: int = Field(8, ge=1)
    """Size of one bucket, MiB; there are two of them. Through shared memory a larger tensor is spread over several;
    CUDA IPC sends tensors whole, and its buckets are as large as the largest."""
    checksum: bool = True
    """Check every bucket's bytes on arrival (xxh3; what it costs: docs/benchmarks.md)."""
    verify: bool = False
    """After every push, read the weights back out of the engine and compare them; slow, for finding faults."""
