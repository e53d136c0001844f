"""Microbatch, recomputation and response length of a first config, by the memory model.

fit = fitting(config, hf_config, device)      # None: nothing fits
fit.config.parallel.micro_batch_tokens, fit.num_bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any, Literal

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.memory.engine import engine_bytes
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.memory.select_mode import resolve, with_mode
from oblr_megatron.preflight.device_memory import RankDevice, rank_memory
from oblr_megatron.preflight.examine import check_fits

USED_SHARE = {False: 0.75, True: 0.95}
"""Share of free memory that a first config plans for, without and with a GPU.

On a CPU glibc keeps freed blocks: a rank may take up to a third more than estimated (docs/results.md).
"""
SHORTEST_RESPONSE = 64
CACHED = (32, 8, 2)
"""Sequences of the greatest length that a CPU engine's KV cache holds, the first choice first."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A config that fits. Example: Fit(Config(...), num_bytes=12_700_000_000)"""

    config: Config
    num_bytes: int  # that a rank and its engine need


def fitting(config: Config, hf_config: Mapping[str, Any], device: RankDevice) -> Fit | None:
    """The first of `choices` that fits on one rank of this device; None if none does."""
    planned = device
    if device.num_bytes is not None:
        planned = replace(device, num_bytes=int(USED_SHARE[device.on_gpu] * device.num_bytes))
    per_token = 0 if device.on_gpu or device.num_bytes is None else kv_token_bytes(hf_config, config)
    for choice in choices(config, on_gpu=device.on_gpu, kv_token_bytes=per_token):
        with suppress(UserError):  # it does not fit
            norms = resolve(
                hf_config,
                choice,
                1,
                free_bytes=planned.num_bytes,
                on_gpu=device.on_gpu,
                transformer_engine=device.transformer_engine,
            )
            memory = rank_memory(hf_config, with_mode(choice, norms.mode), 1, planned)
            check_fits(memory, choice, planned)
            return Fit(choice, max(one.peak for one in memory))
    return None


def kv_token_bytes(hf_config: Mapping[str, Any], config: Config) -> int:
    """Bytes of a token in the KV cache of a CPU engine."""
    return engine_bytes(hf_config, config, device_bytes=None).kv_bytes_per_token


def choices(config: Config, *, on_gpu: bool, kv_token_bytes: int = 0) -> Iterator[Config]:
    """The config with less and less memory: smaller microbatches, a CPU engine's smaller KV cache, recomputation,
    offloaded state, shorter responses.

    A microbatch holds at least one whole sample. Nothing is offloaded on a CPU: the host's memory is the rank's.
    """
    offloads: tuple[Literal["none", "sampling"], ...] = ("none", "sampling") if on_gpu else ("none",)
    response = config.rollout.max_response_tokens
    for tokens in _halved(response, min(response, SHORTEST_RESPONSE)):
        rollout = config.rollout.model_copy(update={"max_response_tokens": tokens})
        longest = max_model_len(config.model_copy(update={"rollout": rollout}))
        needed = () if on_gpu else (count * longest * kv_token_bytes / 2**30 for count in CACHED)
        caches = dict.fromkeys(max(rollout.kv_cache_gib, ceil(2 * gib) / 2) for gib in needed) or [rollout.kv_cache_gib]
        for offload, granularity, gib in product(offloads, ("none", "full"), caches):
            optimizer = config.optimizer.model_copy(update={"offload": offload})
            cached = rollout.model_copy(update={"kv_cache_gib": gib})
            shorter = config.model_copy(update={"rollout": cached, "optimizer": optimizer})
            for bound in _halved(config.parallel.micro_batch_tokens, longest_sample(shorter)):
                changes = {"micro_batch_tokens": bound, "recompute_granularity": granularity}
                yield shorter.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})


def _halved(value: int, least: int) -> Iterator[int]:
    """The value, half of it, and so on, down to `least`, the last one. Example: 8192, 4096, 2048, 1024, 768"""
    while value > least:
        yield value
        value //= 2
    yield least
