"""Sections [rollout] and [weights]: sampling, and weight pushes to the engines. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from oblr_megatron.config.section import LONGEST_WAIT_S, Section
from oblr_megatron.types import Speculation


class EnvironmentConfig(Section):
    """Episodes of several turns, with tools, in place of single responses (docs/environments.md)."""

    function: str = ""
    """"tool_loop", or your own async "package.module:function". Empty: one response to each prompt. Short form:
    rollout.environment = "package.module:function"."""
    tools: tuple[str, ...] = ()
    """Functions "package.module:function" that the policy may call. data.chat_template describes them in the prompt."""
    max_turns: int = Field(16, ge=1)
    """Most responses of the policy in one episode."""
    deadline_s: float = Field(60.0, gt=0, le=LONGEST_WAIT_S)
    """Seconds of an episode. Then it ends, with its tokens so far and the reward 0. Not counted: waits for the engine,
    for a free worker of `tools`, and for other episodes."""
    tool_timeout_s: float = Field(10.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline of one call of a tool, seconds."""
    tool_workers: int = Field(2, ge=1)
    """Worker processes for tools."""
    in_rounds: bool = False
    """Sample the turns of all episodes together, once every episode waits for one. Then equal runs are equal to the
    bit. It is slower if tools or episodes differ in time."""


def _as_environment(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


def _urls(servers: tuple[str, ...]) -> tuple[str, ...]:
    if "" in servers:
        raise ValueError("a URL is empty")
    return servers


LARGEST_SUPPORT = 1024
"""Samples store the tokens of each draw up to this top_k: 8 KB a response token."""


class RolloutConfig(Section):
    """Sampling of responses by vLLM."""

    temperature: float = Field(1.0, ge=0.01, le=2)
    """Sampling temperature, up to 2. The trainer's log-probs use the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus filter. Below 1 also set a top_k of at most 1,024. Without it the trainer cannot renormalise its
    log-probs as the engine does: a run warns, and model.batch_invariant refuses it."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Leaves out tokens with less than this share of the largest probability, before top_k and top_p. Above 0 also
    set a top_k, as with top_p."""
    top_k: int = Field(-1, ge=-1)
    """Top-k filter, -1 for none. Up to 1,024 samples hold the tokens that each draw could take, in 8 (top_k + 8) bytes
    a token, and the trainer's policy is renormalised over them (docs/samples.md)."""
    max_response_tokens: int = Field(512, ge=1)
    """Longest response; longer ones are cut (finish_reason "length"). With an environment, all tokens after the
    prompt."""
    environment: Annotated[EnvironmentConfig, BeforeValidator(_as_environment)] = EnvironmentConfig()
    servers: Annotated[tuple[str, ...], AfterValidator(_urls)] = ()
    """URLs of servers to sample from instead of own engines, e.g. ["http://10.0.0.5:8000"]. One URL may stand
    without brackets. Start them with `oblr-megatron serve`. OBLR_API_KEY holds their key."""
    num_engines: int | None = Field(None, ge=1)
    """vLLM engines. By default one per tensor_parallel_size ranks on GPUs, and a single one on CPUs."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs per engine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the engine's weights. "auto": the trainer's (float32 for float64)."""
    quantization: Literal["none", "fp8"] = "none"
    """"fp8": engines on GPUs round the bfloat16 weights to FP8 at every push (vLLM's online `fp8_per_tensor`). Needs
    importance_sampling."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """vLLM's share of the trainer's GPUs. A server on GPUs of its own takes `serve --gpu-memory-utilization`."""
    kv_cache_gib: float = Field(0.5, gt=0, le=1e6)
    """KV cache of a CPU engine, GiB."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that an engine decodes at once."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of a CPU engine; by default all cores divided by the number of engines."""
    importance_sampling: Literal["none", "token", "sequence"] = "token"
    """Truncated importance weights against the mismatch of trainer and engine, per token or per sequence."""
    importance_cap: float = Field(2.0, ge=1, le=1e30)
    """Upper bound of the importance weights; cut weights are counted."""
    rejection: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weight 0 outside the band of rejection_low and rejection_high. "token": by each token's ratio pi / mu.
    "sequence", "geometric": whole responses, by product or geometric mean of their ratios (docs/corrections.md)."""
    rejection_low: float | None = Field(None, ge=0, le=1)
    """Lower end of the band. By default 1 / rejection_high."""
    rejection_high: float = Field(2.0, ge=1)
    """Upper end of the band."""
    overlap: Literal["none", "stream", "one_step"] = "none"
    """Work of the trainer while the engines sample. "none": it waits for the whole batch. "stream": it computes the
    gradient of finished prompts, on-policy. "one_step": it trains on samples that are one update old
    (docs/overlap.md)."""
    wave_tokens: int | None = Field(None, ge=1)
    """Tokens of finished prompts that "stream" waits for before it computes their gradient. By default one microbatch
    for each replica; with pipeline parallelism four for each stage of a replica."""
    speculation: Speculation = "none"
    """Where engines take drafts of the next tokens from while few responses are left: "ngram", the same text;
    "suffix", also other responses (needs arctic-inference). It changes no draw (docs/speculation.md). Servers must be
    started with the same --speculation."""
    speculation_below: int | None = Field(None, ge=0)
    """Most sequences of an engine that are sampled with drafts. By default each engine measures where they pay."""
    vllm: dict[str, Any] = Field({})
    """Further options of vLLM's engine (the fields of its `EngineArgs`), e.g. {enable_prefix_caching = false}. Options
    that this package sets are refused (docs/rollout.md). Servers must be started with the same --vllm."""
    max_staleness: int = Field(0, ge=0)
    """Weight updates that a sample may lag behind the trainer; older samples are refused. 0: strictly on-policy."""
    dynamic_sampling: bool = False
    """Replace groups with equal rewards by groups of other prompts (DAPO). This divides the gradient by the share of
    mixed groups. It changes the direction too if equal groups have a gradient, as with a pool, the default
    (docs/samples.md)."""
    sleep_level: Literal[0, 1, 2] = 2
    """Memory that engines on the trainer's GPUs free during training. 0: none. 1: the KV cache, and weights move to
    host memory. 2: KV cache and weights; the next push restores the weights before sampling."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of a dead or hung engine in a row, without a completed rollout in between. After one more loss the run
    saves a checkpoint and ends."""
    lora: Literal["adapter", "merged"] = "merged"
    """Weights that a push sends if model.lora.rank is set. "merged": all weights, with the adapters added. "adapter": A
    and B alone, into vLLM's LoRA slot (docs/weights.md); servers then need --lora."""
    save: bool = False
    """Write every step's samples and rewards to RUN_DIR/rollouts (`train --save-rollouts`)."""
    replay: Path | None = None
    """Directory of saved samples to train from, without vLLM (`train --replay DIR`)."""
    only: bool = False
    """Sample, score and save num_steps batches without training (`train --rollout-only`)."""
    start_timeout_s: float = Field(600.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline for starting an engine, seconds."""
    generate_timeout_s: float = Field(1800.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline of one generate call, seconds."""
    push_timeout_s: float = Field(300.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline of one weight push, seconds."""

    @property
    def filters(self) -> dict[str, float]:
        """The filters that are on. Example: {"top_p": 0.9}"""
        on = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return {name: getattr(self, name) for name, active in on.items() if active}

    @property
    def own_engines(self) -> bool:
        """Whether the run starts engines itself, on the trainer's devices."""
        return self.replay is None and not self.servers

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and engines share GPU memory by turns."""
        return self.own_engines and self.sleep_level > 0

    def engines(self, ranks: int, *, on_gpu: bool) -> int:
        """Engines that a run of this many ranks starts: as configured, else one on CPUs, else as many as fit."""
        return self.num_engines or (ranks // self.tensor_parallel_size if on_gpu else 1)


class WeightsConfig(Section):
    """Weights on their way from the trainer to the engines."""

    verify: bool = False
    """After every push, read the weights back from the engine and compare them. Slow; for debugging."""
