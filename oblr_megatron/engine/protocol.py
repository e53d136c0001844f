"""The protocol between the trainer and rollout engines, wherever they run, and its records. Imports no vllm.

    engines.push(source, version=1)                # all weights; after a failed push nothing is generated
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))

Sampling is a function of the weights, the prompts and the request. Prompt q of a step draws from `prompt_seed(seed, q)`
wherever it is sampled, so splitting a batch over engines does not change the draws. (A batch of another shape may round
the last bits of log-probs differently, which can change a draw at the edge between two tokens.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from oblr_megatron.checks.lengths import longest_evaluated
from oblr_megatron.errors import UserError
from oblr_megatron.memory.buffer_sizes import cpu_step_tokens
from oblr_megatron.types import HeadDtype, widens_logits
from oblr_megatron.weights.adapter import AdapterShape

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.rewards.base import Reward, RewardResult
    from oblr_megatron.types import Prompt, Sample, Speculation
    from oblr_megatron.weights.manifest import Source

API_KEY = "OBLR_API_KEY"
"""Environment variable with the key of the servers."""
KEY_CHARACTERS = "printable ASCII characters without spaces"
SEED_STRIDE, BATCH_STRIDE = 1_000_003, 2**40  # between the seeds of runs, and of batches of a step
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first, so its log-probs would be of another distribution. It refuses
one above the second."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Settings for sampling the prompts of a call.

    Example: SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7)
    """

    group_size: int  # G, responses per prompt; greedy ones are equal and computed once
    temperature: float  # also that of the log-probs; 0 decodes greedily with log-probs of temperature 1
    max_tokens: int  # of a response; engines refuse prompts with which it exceeds max_model_len
    seed: int  # each call of a run has its own: equal seeds give equal samples
    top_p: float = 1.0
    top_k: int = -1  # -1: no filter
    min_p: float = 0.0
    routes: bool = False  # whether samples hold the experts that the engine took (`EngineSpec.routes`)
    recorded: int = 0  # most likely tokens that samples hold for each draw (`Sample.recorded`)

    def __post_init__(self) -> None:
        where = "sampling request"
        if self.group_size < 1 or self.max_tokens < 1:
            what = f"group_size {self.group_size} and max_tokens {self.max_tokens} must both be at least 1"
            raise UserError(what, where=where, fix="raise the one that is below 1")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            span = f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
            what = f"temperature {self.temperature} is outside {span}, at which vLLM samples"
            raise UserError(what, where=where, fix=f"use {span}, or 0 for greedy decoding")

    @classmethod
    def for_training(cls, config: Config, seed: int) -> SamplingRequest:
        """The request for a training step's prompts."""
        rollout = config.rollout
        return cls(
            config.group_size,
            rollout.temperature,
            rollout.max_response_tokens,
            seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            routes=config.model.moe_routing_replay,
            recorded=config.recorded_tokens,
        )

    @classmethod
    def for_evaluation(cls, config: Config, seed: int, *, greedy: bool) -> SamplingRequest:
        """The request for held-out prompts: one greedy response, or evaluate.samples_per_prompt drawn ones."""
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
        """Whether the most likely token is always taken, so that all responses of a prompt are equal."""
        return self.temperature == 0


def is_key(text: str) -> bool:
    """Whether a key has `KEY_CHARACTERS` only, so that a header can hold it."""
    return text.isascii() and text.isprintable() and " " not in text


def api_key() -> str:
    """The trainer's key of its servers, empty for none; a `UserError` if no server can have it."""
    key = os.environ.get(API_KEY, "")
    if not is_key(key):
        fix = f'set it to the key of the servers, e.g. export {API_KEY}="$(cat FILE)"'
        raise UserError(f"the key is not of {KEY_CHARACTERS}", where=API_KEY, fix=fix)
    return key


def call_seed(seed: int, step: int, batch: int = 0) -> int:
    """The seed of one generate call, unique among all batches and evaluations of a run's first million steps.

    Steps count from 0. Batch 0 of a step has the same seed as without dynamic sampling.
    """
    return seed * SEED_STRIDE + step + batch * BATCH_STRIDE


def prompt_seed(seed: int, position: int) -> int:
    """The seed of a prompt's first response; response g of the group draws from this seed plus g.

    A hash makes the seeds of neighbouring steps and prompts independent. It has 62 bits, so adding g stays in int64.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to sample a group of responses to.

    Example: PromptRequest(number=7, ids=(5, 9), request=SamplingRequest(1, 1.0, 64, 3), position=0)
    """

    number: int  # names it in the engine's replies, and differs from those of all prompts that are being sampled
    ids: tuple[int, ...]  # in an episode everything so far: prompt, earlier responses, observations
    request: SamplingRequest
    position: int  # in the step's batch, or the turn of an episode; decides the seed
    stop: tuple[int, ...] = ()  # tokens that end a response, in addition to the model's


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of an engine process.

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
    head_dtype: HeadDtype = "auto"
    batch_invariant: bool = False  # log-probs that depend on no batch, equal to the trainer's
    sleep_mode: bool = False  # whether a GPU engine can free its memory and take it back later
    speculation: Speculation = "none"
    speculation_below: int | None = None  # most sequences that are sampled with drafts; None: measured
    routes: bool = False  # whether the engine can return routes (`engine.routes`)
    server: bool = False  # whether it stands behind `engine.http_door`, not next to a rank
    lora: AdapterShape | None = None  # of the adapters that are pushed into it
    adapter: Path | None = None  # directory of the adapter that it starts with, in PEFT's format
    vllm: Mapping[str, Any] = field(default_factory=dict)  # further options of vLLM's engine

    @property
    def widens_logits(self) -> bool:
        """Whether logits are fp32 although the weights are not."""
        return widens_logits(self.head_dtype, self.dtype, on_gpu=self.device == "cuda")

    @property
    def vllm_quantization(self) -> str | None:
        """vLLM's name of the scheme that rounds bfloat16 weights when they are loaded and when they are pushed.

        vLLM 0.32 uses plain "fp8" for checkpoints that are rounded already.
        """
        return {"none": None, "fp8": "fp8_per_tensor"}[self.quantization]

    @property
    def cpu_step_tokens(self) -> int:
        """Tokens that a CPU engine computes in one step: at least a whole prompt, or a token of each sequence.

        Chunked prefill is off on a CPU. With a prompt split over two steps, vLLM rewinds the request's generator by an
        offset, which a CPU generator does not have, and the engine dies.
        """
        return cpu_step_tokens(self.max_model_len, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class PushStats:
    """Size and duration of a push.

    Example: PushStats(bytes=3_145_728, seconds=0.012, tensors=38, buckets=1)
    """

    bytes: int  # per engine
    seconds: float  # until the last engine served the new weights
    tensors: int
    buckets: int

    @classmethod
    def total(cls, parts: Sequence[PushStats]) -> PushStats:
        """Of several pushes in turn: of a base and its adapter."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


class BatchInFlight(Protocol):
    """A batch that is being sampled; every rank calls with the same arguments and gets the same result."""

    @property
    def rewards(self) -> Mapping[int, RewardResult]:
        """Of all groups that were taken, by position, if `begin` was given a reward; {} in a replay."""
        ...

    def next_groups(self, tokens: float) -> dict[int, list[Sample]]:
        """Wait for finished prompts with at least `tokens` tokens, or for the rest of the batch.

        Returns the group of responses of each finished prompt, by its position in the batch. Each group comes once; {}
        at the end. Raises as `RolloutEngine.generate`.
        """
        ...


class Sampler(Protocol):
    """Samples responses to prompts: all that an evaluation needs."""

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """Sample N = Q * group_size responses, prompt-major, the same list on every rank.

        Args:
            prompts: Q prompts; sample n answers prompts[n // group_size].
            request: how to sample them; a prompt's position is its place in `prompts`.

        Raises:
            RunError: an engine failed, or the last push failed.
        """
        ...


class RolloutEngine(Sampler, Protocol):
    """The source of the step loop's samples: one engine or many, anywhere.

    Every rank of the trainer calls every method with the same arguments and gets the same result. Every wait has a
    deadline. An engine that died, hung or lost its connection is replaced, and its unfinished work is repeated, up to
    `rollout.max_restarts` times in a row. Then the call raises `EngineLostError` with the tail of the engine's log.
    """

    @property
    def version(self) -> int:
        """Version of the weights being served; 0 is the checkpoint that the engines started from."""
        ...

    def begin(self, prompts: Sequence[Prompt], request: SamplingRequest, reward: Reward | None = None) -> BatchInFlight:
        """Begin to sample what `generate` would return, and return; the engines go on in the background.

        The reward is of this rank alone. It scores groups in the background as they are finished.
        """
        ...

    def push(self, source: Source, version: int) -> PushStats:
        """Replace all weights and drop all cached prefixes. All ranks iterate the source, whatever an engine does.

        Args:
            source: whole tensors under Hugging Face names, the same on every rank. It is kept, and iterated again when
                an engine is replaced. So it must yield these weights whenever samples are requested before the next
                push. Of an `AdapterWeights` the base is pushed first into engines that lack it.
            version: of the weights; samples carry it.

        Raises:
            RunError: an engine did not take the weights (a tensor is missing, unknown, of another shape, or damaged).
                Nothing is generated until a later push succeeds.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory until the next push or generate, which wake the engines. By default engines never sleep.

        Args:
            level: 0 frees nothing; 1 frees the KV cache and moves the weights to host memory; 2 drops the weights.
        """
        return

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, the same on every rank, e.g. {"rollout/restarts": 1}."""
        return {}

    def close(self) -> None:
        """End the engines. Not collective: a rank may close at any time, even after an error, and more than once."""
        return
