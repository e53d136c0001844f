"""Samples, policies and the oracle's norms that the gradient-norm tests of several ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.algo.importance import truncated_ratios
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig
from oblr_megatron.data.packing import pack
from oblr_megatron.gradient.loss_fn import score_loss
from oblr_megatron.gradient.ratios import RatioFn, ScoreWeights
from oblr_megatron.model.lm_head import TokenScores
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logprobs
from oblr_megatron.norms.two_pass import sq_grad_norms
from oblr_megatron.types import MicroBatch, Sample
from tests.tiny import VOCAB

TEMPERATURE = 0.8
CAP = 1.1  # cuts about a third of the ratios
RTOL = 1e-10

# (prompt, response) lengths; repeated ids in every second sample, one response of length 0, one of one token. No two in
# flight agree in length, and an odd number of samples does not divide by the replicas. In two samples an environment
# wrote some tokens of the response.
LENGTHS = ((3, 5), (1, 1), (7, 12), (2, 0), (4, 9), (6, 2), (5, 7))
MASKS = {2: (True, True, False, False, True, False, True, True, True, True, False, False), 6: (False,) + (True,) * 6}


def make_samples(seed: int = 0) -> list[Sample]:
    """Equal on every rank."""
    random = Random(seed)
    samples = []
    for n, (prompt, response) in enumerate(LENGTHS):
        ids = [random.randrange(VOCAB) for _ in range(prompt + response)]
        if n % 2 == 0:
            ids = [ids[0] if j % 3 == 0 else token for j, token in enumerate(ids)]
        logprobs = tuple(-math.log(VOCAB) + random.uniform(-0.5, 0.5) for _ in range(response))
        mask = MASKS.get(n, ())
        logprobs = tuple(value if own else 0.0 for value, own in zip(logprobs, mask or logprobs, strict=True))
        samples.append(Sample(n, tuple(ids[:prompt]), tuple(ids[prompt:]), logprobs, "", "stop", 0, mask))
    return samples


def drawn(sample: Sample) -> Tensor:
    """Log-probs of the tokens that the policy wrote, fp64."""
    written = torch.tensor(sample.mask or (True,) * len(sample.logprobs), dtype=torch.bool)
    return torch.tensor(sample.logprobs, dtype=torch.float64)[written]


def batches_of(samples: Sequence[Sample], *, pad_multiple: int = 1) -> list[MicroBatch]:
    """One microbatch a sample, with rollout log-probs in fp64 so that the ratios are exact to the last digit."""
    batches = [pack(samples, [n], max_tokens=1, pad_multiple=pad_multiple)[0] for n in range(len(samples))]
    for batch, sample in zip(batches, samples, strict=True):
        batch.rollout_logprobs = batch.rollout_logprobs.double()
        batch.rollout_logprobs[batch.mask] = drawn(sample)
    return batches


def _capped(scores: TokenScores, batch: MicroBatch) -> ScoreWeights:
    rho, cut = truncated_ratios(scores.logprobs.detach(), batch.rollout_logprobs, batch.mask, level="token", cap=CAP)
    return ScoreWeights(rho, None, lambda: cut)


token_ratios = RatioFn(_capped, center=False)
"""The run's own truncated importance ratios."""


def load_policy(path: Path, parallel: Parallel, *, dtype: str = "float64") -> Policy:
    config = ModelConfig.model_validate({"path": path, "dtype": dtype, "make_vocab_size_divisible_by": 8})
    policy = build_policy(AutoConfig.from_pretrained(path), config, parallel)
    load_hf_weights(policy, path)
    return policy


def oracle(
    path: Path,
    samples: Sequence[Sample],
    *,
    ratios: bool,
    frozen: Sequence[str] = (),
    rounded_to: torch.dtype = torch.float64,
) -> Tensor:
    """w of each sample by the oracle in fp64, with the weights rounded to a dtype first.

    Parameters are not counted if their Hugging Face name contains one of `frozen`.
    """
    config = AutoConfig.from_pretrained(path)
    weights = {name: weight.to(rounded_to).double() for name, weight in load_file(path / "model.safetensors").items()}
    norms = torch.zeros(len(samples), dtype=torch.float64)
    for n, sample in enumerate(samples):
        ratio = None
        if ratios:
            logprobs = oracle_logprobs(weights, config, sample, TEMPERATURE)
            ratio = (logprobs - drawn(sample)).exp().clamp(max=CAP)
        gradient = oracle_gradient(weights, config, sample, TEMPERATURE, ratio)
        norms[n] = sum(
            grad.square().sum() for name, grad in gradient.items() if not any(part in name for part in frozen)
        )
    return norms


def sample_sq_grad_norms(
    policy: Policy, batches: Sequence[MicroBatch], temperature: float = 1.0, ratios: Any = None, **options: Any
) -> Tensor:
    """w of every sample: the library's norms of the trainer's loss."""
    return sq_grad_norms(policy, batches, score_loss(policy, temperature, ratios), **options)


def relative_error(norms: Tensor, expected: Tensor) -> float:
    """The largest of all samples; an expected 0 must be 0 exactly."""
    assert torch.equal(norms == 0, expected == 0), (norms, expected)
    return float(((norms - expected).abs() / expected.clamp(min=torch.finfo(torch.float64).tiny)).max())
