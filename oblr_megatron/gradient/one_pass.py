"""Norms and policy gradient in one forward and backward pass: `inline`, `bookkeep` and `stash`.

A pass processes whole prompts. It computes their norms, asks for the coefficients of a group as soon as its norms are
known, and adds the gradient of the samples to `main_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.gradient.estimate import norm_batches
from oblr_megatron.gradient.loss_fn import PassMetrics, score_loss
from oblr_megatron.gradient.ratios import RatioFn
from oblr_megatron.memory.buffer_sizes import KEPT_BYTES
from oblr_megatron.norms.bookkeep import keep_factors
from oblr_megatron.norms.buffer import GradientBuffer, add_weighted
from oblr_megatron.norms.inline import add_inline
from oblr_megatron.norms.reduce import Reducer
from oblr_megatron.norms.rules import classify
from oblr_megatron.norms.stash import stash_gradients
from oblr_megatron.norms.two_pass import pipeline_runs

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.model.step import LossFn
    from oblr_megatron.types import Sample

AdvantageFn = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""Positions of k prompts and their samples' norms w [k, G] -> coefficients c [k, G], fp64 on the CPU."""


@dataclass(slots=True)
class Work:
    """Inputs and results of the passes of one step."""

    samples: Sequence[Sample]  # [N]
    coefficients_of: AdvantageFn
    ratios: RatioFn
    norms_sq: Tensor  # [N] fp64 on the CPU; each replica fills in its own samples
    metrics: PassMetrics


class _OnePass:
    """What all of these passes have."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy, self._config = policy, config
        self._rules = classify(policy)
        self._reducer = Reducer(policy.parallel)

    def _loss(self, work: Work) -> LossFn:
        return score_loss(self._policy, self._config.rollout.temperature, work.ratios, records=True)


class InlinePass(_OnePass):
    """Mode `inline`: microbatches as in plain training; of one sample if a parameter cannot tell samples apart."""

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """Leave the gradient of these samples in main_grad, which is zero before; whole prompts in prompt-major order.

        If a norm is not finite, its sample has already spoilt main_grad. The pass is then repeated without that sample.
        """
        coefficients = torch.zeros_like(work.norms_sq)
        coefficients[list(indices)] = weighted(work, indices, self._config.group_size)
        metrics = self._add(work, indices, coefficients)
        broken = ~work.norms_sq.isfinite()
        if bool(broken[list(indices)].any()):
            coefficients[broken] = 0.0
            self._policy.zero_grad()
            metrics = self._add(work, indices, coefficients)
        work.metrics.include(metrics)

    def _add(self, work: Work, indices: Sequence[int], coefficients: Tensor) -> PassMetrics:
        metrics = PassMetrics()
        whole = norm_batches(self._policy, self._config, self._rules, work.samples, indices)
        for batches in pipeline_runs(self._policy, whole, self._rules, KEPT_BYTES):
            order = torch.cat([batch.sample_index for batch in batches]).cpu()
            own = coefficients[order]
            norms, records = add_inline(self._policy, batches, self._loss(work), own, self._rules, self._reducer)
            work.norms_sq[order] = norms.cpu()
            metrics.add(records, own)
        return metrics


class BookkeepPass(_OnePass):
    """Mode `bookkeep`: windows of prompts up to `window_tokens` tokens, several samples a microbatch."""

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """Add the gradient of these samples to main_grad; whole prompts in prompt-major order."""
        for window in self._windows(work.samples, indices):
            batches = norm_batches(self._policy, self._config, self._rules, work.samples, window)
            norms, records, sink = keep_factors(self._policy, batches, self._loss(work), self._rules, self._reducer)
            order = torch.cat([batch.sample_index for batch in batches]).cpu()
            work.norms_sq[order] = norms.cpu()
            coefficients = torch.zeros_like(work.norms_sq)
            coefficients[window] = weighted(work, window, self._config.group_size)
            work.metrics.add(records, coefficients[order])
            sink.add_gradient(coefficients[order])

    def _windows(self, samples: Sequence[Sample], indices: Sequence[int]) -> Iterator[list[int]]:
        """Windows of whole prompts: at least one prompt, otherwise at most `window_tokens` tokens."""
        window: list[int] = []
        held = 0
        for prompt in _groups(indices, self._config.group_size):
            tokens = sum(samples[n].num_tokens for n in prompt)
            if window and held + tokens > self._config.gradnorm.window_tokens:
                yield window
                window, held = [], 0
            window, held = window + prompt, held + tokens
        if window:
            yield window


class StashPass(_OnePass):
    """Mode `stash`: one gradient buffer for each sample of a prompt, allocated at first use and kept from then on."""

    def __init__(self, policy: Policy, config: Config) -> None:
        super().__init__(policy, config)
        self._kept: list[GradientBuffer] = []

    def add(self, work: Work, indices: Sequence[int]) -> None:
        """Add the gradient of these samples to main_grad; whole prompts in prompt-major order."""
        self._kept = self._kept or [GradientBuffer(self._policy) for _ in range(self._config.group_size)]
        for prompt in _groups(indices, self._config.group_size):
            batches = one_per_microbatch(work.samples, prompt, device=self._policy.parallel.device)
            norms, records = stash_gradients(
                self._policy, batches, self._loss(work), self._rules, self._reducer, self._kept
            )
            work.norms_sq[prompt] = norms.cpu()
            coefficients = weighted(work, prompt, self._config.group_size)
            work.metrics.add(records, coefficients)
            add_weighted(self._policy, self._kept, coefficients.tolist())

    def release(self) -> None:
        """Free the buffers: engines on the same device need the memory."""
        self._kept = []


def _groups(indices: Sequence[int], size: int) -> list[list[int]]:
    """Split prompt-major samples into prompts."""
    assert len(indices) % size == 0, f"{len(indices)} samples are not whole prompts of {size}"
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def weighted(work: Work, indices: Sequence[int], group_size: int) -> Tensor:
    """Coefficients c [n] of the samples of whole prompts."""
    prompts = [group[0] // group_size for group in _groups(indices, group_size)]
    return work.coefficients_of(prompts, work.norms_sq[list(indices)].view(-1, group_size)).flatten()
