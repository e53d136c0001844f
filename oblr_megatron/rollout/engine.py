"""What the trainer asks of a rollout engine, whatever holds it: the protocol and its records. Imports no vllm.

    engine.push(source, version=1)                     # all weights, or the engine refuses to generate
    request = SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7)
    groups = engine.generate([(5, 9, 2), (5, 3)], request)   # 2 lists of 8 samples, each of version 1

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

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from oblr_megatron.types import Sample
    from oblr_megatron.weights.manifest import Source

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this value, and the log-probs would not be those that were asked for."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """How one call samples.

    Example: SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7, first_group=16) samples prompts
    16, 17, ... of the step, eight responses each.
    """

    group_size: int  # G, responses a prompt; greedy ones are equal and computed once
    temperature: float  # 0 decodes greedily, and the log-probs are then those of temperature 1
    max_tokens: int
    seed: int
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
                mend=f"use 0 for greedy decoding, or at least {MIN_TEMPERATURE}",
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
    seed: int = 0


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
    """One engine, or many behind one face.

    Every call has a deadline (`DeadlineError`), and an engine that died raises `RunError` with the tail of its log.
    """

    @property
    def version(self) -> int:
        """Of the weights being served; 0 is the checkpoint the engine started from."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[list[Sample]]:
        """Q prompts of token ids -> Q groups of G samples.

        Raises:
            RunError: also when a push has failed since the last complete one.
        """
        ...

    def push(self, source: Source, version: int) -> PushStats:
        """Replace all weights, and forget every cached prefix.

        Raises:
            RunError: a tensor is missing, unknown, of another shape or damaged on the way; nothing is served until a
                later push succeeds.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory: the KV cache, and the weights (1: kept in host memory, 2: dropped until the next push)."""
        ...

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back, in stages ("weights" before a push, "kv_cache" before sampling), or all of it."""
        ...

    def close(self) -> None:
        """End the engine; may be called again."""
        ...
