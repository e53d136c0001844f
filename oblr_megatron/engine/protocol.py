"""What the trainer asks of the rollout engines, wherever they run: the protocol and its records. Imports no vllm.

    engines.push(source, version=1)                # all weights, or nothing is generated any more
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))

Sampling is a pure function of the weights, the prompts and the request: prompt number q of a step draws from the seed
`prompt_seed(seed, q)` wherever it is sampled, so the split of a batch over engines does not change the draws. (A batch
of another shape may round its log-probs differently in the last bits, and a draw on the edge then falls otherwise.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from oblr_megatron.checks.lengths import longest_evaluated
from oblr_megatron.errors import UserError
from oblr_megatron.memory.buffer_sizes import CPU_STEP_TOKENS

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.manifest import Source

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this value, and the log-probs would not be those that were asked for."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """How a call's prompts are sampled; and, told to one engine, which part of them is its own.

    Example: SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7, first_group=16) samples prompts
    16, 17, ... of the step, eight responses each.
    """

    group_size: int  # G, responses a prompt; greedy ones are equal and computed once
    temperature: float  # the log-probs are of this distribution; 0 decodes greedily, with those of temperature 1
    max_tokens: int  # of a response; prompt and response together end at the engine's max_model_len at the latest
    seed: int  # equal seeds give equal samples: each call of a run has its own
    first_group: int = 0  # position of the call's first prompt in the step's batch
    top_p: float = 1.0
    top_k: int = -1  # -1: no filter

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.max_tokens < 1:
            raise UserError(
                f"group_size {self.group_size} and max_tokens {self.max_tokens} must both be at least 1",
                where="sampling request",
            )
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise UserError(
                f"temperature {self.temperature} is below {MIN_TEMPERATURE}, which vLLM does not sample at",
                where="sampling request",
                fix=f"use 0 for greedy decoding, or at least {MIN_TEMPERATURE}",
            )

    @classmethod
    def for_training(cls, config: Config, seed: int) -> SamplingRequest:
        """What a step's prompts are sampled with."""
        rollout = config.rollout
        return cls(
            config.group_size,
            rollout.temperature,
            rollout.max_response_tokens,
            seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    @classmethod
    def for_evaluation(cls, config: Config, seed: int, *, greedy: bool) -> SamplingRequest:
        """What held-out prompts are sampled with: one greedy response, or evaluate.samples_per_prompt drawn ones."""
        options, max_tokens = config.evaluate, longest_evaluated(config)
        if greedy:
            return cls(1, 0.0, max_tokens, seed)
        return cls(
            options.samples_per_prompt,
            options.temperature,
            max_tokens,
            seed,
            top_p=options.top_p,
            top_k=options.top_k,
        )

    @property
    def greedy(self) -> bool:
        """Whether every response of a prompt is the same, most likely one."""
        return self.temperature == 0


def prompt_seed(seed: int, position: int) -> int:
    """The seed of one prompt's first response; response g of the group draws from this plus g.

    A hash, so that neighbouring steps and neighbouring prompts share nothing; 62 bits, so that adding g stays in int64.

    Args:
        seed: of the call.
        position: of the prompt in the step's batch.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine process is told when it starts.

    Example: EngineSpec(name="engine 0", model=Path("/models/q"), dtype="float32", device="cpu", max_model_len=1536,
                        max_num_seqs=256, kv_cache_bytes=2**29, num_threads=2)
    """

    name: str
    model: Path
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int  # of a CPU engine
    num_threads: int  # of a CPU engine
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES of a GPU engine
    quantization: Literal["none", "fp8"] = "none"
    sleep_mode: bool = False  # whether a GPU engine can free its memory and take it back
    seed: int = 0

    @property
    def vllm_quantization(self) -> str | None:
        """vLLM's name of it: the scheme that rounds weights in bfloat16 as they are loaded, and as they are pushed.

        vLLM 0.32 keeps plain "fp8" for checkpoints that are rounded already.
        """
        return {"none": None, "fp8": "fp8_per_tensor"}[self.quantization]

    @property
    def cpu_step_tokens(self) -> int:
        """Tokens that a CPU engine computes in one step, at least a whole prompt's.

        A prompt whose prefill is cut over two steps kills it: vLLM then turns the request's generator back by an
        offset, which a CPU's generator does not have. So chunked prefill is off there.
        """
        return max(CPU_STEP_TOKENS, self.max_model_len)


@dataclass(frozen=True, slots=True)
class PushStats:
    """What a push moved.

    Example: PushStats(bytes=3_145_728, seconds=0.012, tensors=38, buckets=1)
    """

    bytes: int  # of one engine
    seconds: float  # until the last engine served the new weights
    tensors: int
    buckets: int


class RolloutEngine(Protocol):
    """Where the step loop gets its samples from: one engine or many, in whatever place.

    Every rank of the trainer calls every method with the same arguments and gets the same result. Every wait has a
    deadline. An engine that died, hung or lost its connection is replaced, and what it owed is done again, up to
    `rollout.max_restarts` times in a row; after that the call raises `EngineLostError`, with the tail of its log.
    """

    @property
    def version(self) -> int:
        """Of the weights being served; 0 is the checkpoint the engine started from."""
        ...

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """Sample N = Q * group_size responses, prompt-major, the same list on every rank.

        Args:
            prompts: Q prompts; sample n answers prompts[n // group_size].
            request: how; prompts are numbered from 0 whatever its first_group says.

        Raises:
            RunError: an engine failed, or a push has failed since the last complete one.
        """
        ...

    def push(self, source: Source, version: int) -> PushStats:
        """Replace all weights, and forget every cached prefix. All ranks iterate the source, whatever an engine does.

        Args:
            source: of whole tensors under Hugging Face names, the same on every rank. It is kept, and iterated again
                when an engine has to be replaced: until the next push it must go on yielding these weights wherever
                samples are asked for.
            version: of the weights; samples carry it.

        Raises:
            RunError: an engine did not take them (a tensor is missing, unknown, of another shape, damaged on the way);
                nothing is generated until a later push succeeds everywhere.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory when no more is sampled before the next push; that and the next generate wake by themselves.

        Args:
            level: 0: nothing; 1: the KV cache, and the weights are kept in host memory; 2: the weights are dropped.
        """
        ...

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back before it is needed, in stages ("weights", then "kv_cache"), or all of it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of what happened since the last call, the same on every rank, e.g. {"rollout/restarts": 1}."""
        ...

    def close(self) -> None:
        """End the engines. Not collective: a rank may close at any time, also after an error, and more than once."""
        ...
