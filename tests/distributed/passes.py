"""Shared by the distributed tests of training passes: samples, policies, gradients by Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.families import OUTPUT
from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.model.step import reduce_data_parallel_grads, reduce_model_parallel_grads, run_schedule
from oblr_megatron.types import MicroBatch, Sample
from oblr_megatron.weights.names import Entry, ModelShape, entry, views
from tests.tiny import VOCAB

TEMPERATURE = 0.7
COEFFICIENTS = torch.tensor([0.5, -1.25, 0.75, 2.0], dtype=torch.float64)
PROMPT = 3  # tokens before the response
ORDERS = [(0, 0, 1), (2, 3, 3), (1,)]  # samples of each packed microbatch; some occur twice
Outcome = tuple[dict[str, Tensor], float]
"""The gradients a rank holds after the reductions, by Hugging Face name, and their squared norm over all ranks."""


hf_config_of = cache(AutoConfig.from_pretrained)


def load_policy(path: Path, parallel: Parallel, options: ParallelConfig | None = None, **model: object) -> Policy:
    """The directory's model in fp64; `options` are those of `build_policy`, `model` further fields of ModelConfig.

    The output layer works in several blocks, and keeps some of them for backward.
    """
    config = ModelConfig.model_validate({"path": path, "dtype": "float64"} | model)
    policy = build_policy(hf_config_of(path), config, parallel, options)
    load_hf_weights(policy, path)
    if policy.lm_head is not None:
        policy.head.block_elements, policy.head.kept_elements = 7 * 16, 6 * 16
    return policy


def make_batches(rows: int = 1) -> list[MicroBatch]:
    """Four samples of different lengths, one of them without response, `rows` to a microbatch; tokens repeat."""
    generator = torch.Generator().manual_seed(5)
    lengths = [9, PROMPT, 14, 6]
    samples = [torch.randint(0, VOCAB // 3, (length,), generator=generator) for length in lengths]
    batches = []
    for first in range(0, len(samples), rows):
        group = samples[first : first + rows]
        width = max(len(sample) for sample in group)
        ids, labels = torch.zeros(2, len(group), width, dtype=torch.long)
        mask = torch.zeros(len(group), width, dtype=torch.bool)
        for row, sample in enumerate(group):
            ids[row, : len(sample)] = sample
            labels[row, : len(sample) - 1] = sample[1:]
            mask[row, PROMPT - 1 : len(sample) - 1] = True
        batches.append(MicroBatch(ids, labels, mask, torch.zeros(mask.shape), torch.arange(first, first + len(group))))
    return batches


def some_batches(count: int) -> list[MicroBatch]:
    """The samples of `make_batches`, one a microbatch, again and again."""
    return [make_batches()[index % 4] for index in range(count)]


def packed_batches() -> list[MicroBatch]:
    """The samples of `make_batches`, packed in rows as `ORDERS` says."""
    return [packed([make_batches()[index] for index in order]) for order in ORDERS]


def packed(rows: list[MicroBatch]) -> MicroBatch:
    """Several microbatches of one sample each as one row."""
    lengths = torch.tensor([0, *(row.input_ids.shape[1] for row in rows)])
    names = ("input_ids", "labels", "mask", "rollout_logprobs", "sample_index")
    fields = [torch.cat([getattr(row, name) for row in rows], dim=-1) for name in names]
    return MicroBatch(*fields, cu_seqlens=lengths.cumsum(0, dtype=torch.int32))


def with_routes(samples: Sequence[Sample], path: str) -> list[Sample]:
    """The samples with routes at random, most of them not the router's own choice.

    The last token of a sample, every fifth token and one whole sample have no route.
    """
    config = hf_config_of(path)
    experts, layers = config.num_experts, config.num_hidden_layers
    generator, routed = np.random.default_rng(11), []
    for n, sample in enumerate(samples):
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        choices = generator.permuted(np.tile(np.arange(experts, dtype=np.int16), (tokens, layers, 1)), axis=-1)
        routes = choices[..., : config.num_experts_per_tok].copy()
        routes[n % 5 :: 5] = -1
        routes[-1] = -1
        routed.append(replace(sample, routes=None if n == 1 else routes))
    return routed


def weighted_logprob_loss(policy: Policy) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
    """sum_n c_n sum_t log pi(o_t). The metric is each sample's unweighted sum over this rank's tokens."""

    def loss_fn(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.labels.shape == hidden.shape[:2]
        sums = batch.per_sample(policy.head(hidden, batch, temperature=TEMPERATURE).logprobs)
        return (COEFFICIENTS.to(sums.device)[batch.sample_index] * sums).sum(), {"sums": sums.detach()}

    return loss_fn


def numbered(batch: MicroBatch) -> MicroBatch:
    """The microbatch with the position of each token, from 1, in the field of the rollout's log-probs."""
    positions = torch.arange(1, batch.input_ids.shape[1] + 1, dtype=torch.float32).expand(batch.input_ids.shape)
    return MicroBatch(batch.input_ids, batch.labels, batch.mask, positions, batch.sample_index, batch.cu_seqlens)


def logits_by_position(policy: Policy, batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]] | None:
    """For each microbatch the positions [t] of this rank's tokens, 0 for padding, and their logits [b, t, V]."""

    def gather(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return hidden.sum(), {"positions": batch.rollout_logprobs[0].long(), "logits": whole_logits(policy, hidden)}

    records = run_schedule(policy, [numbered(batch) for batch in batches], gather, forward_only=True)
    return [(record["positions"], record["logits"]) for record in records] if policy.parallel.is_last_stage else None


def whole_logits(policy: Policy, hidden: Tensor) -> Tensor:
    """[b, t, V] of the model's output, from all tensor-parallel ranks."""
    logits = policy.head.logits(hidden)
    shards = [torch.empty_like(logits) for _ in range(policy.parallel.tp_size)]
    dist.all_gather(shards, logits, group=policy.parallel.tp_group)
    return torch.cat(shards, dim=-1)[..., :VOCAB]


def merge(item: Entry, shards: Sequence[Tensor], shape: ModelShape) -> list[tuple[str, Tensor]]:
    """The whole Hugging Face tensors from all shards in rank order."""
    stacked = shards[0][None] if len(shards) == 1 else torch.stack(list(shards))
    whole = zip(views(item, stacked, shape), item.shapes, strict=True)
    return [(name, view.reshape(size)) for (name, view), size in whole]


def whole_gradients(policy: Policy) -> dict[str, Tensor]:
    """This rank's main_grad by Hugging Face name; the last stage's copy of a tied embedding is "copy of ...".

    Tensors are whole: those of this pipeline stage, and the experts of this expert-parallel rank.
    """
    parallel, shape = policy.parallel, ModelShape.of(policy.hf_config)
    gradients = {}
    for name, parameter in policy.named_parameters():
        item = entry(name, shape)
        group = parallel.tp_group if item.expert is None else parallel_state.get_expert_tensor_parallel_group()
        shards = [torch.empty_like(parameter.main_grad) for _ in range(group.size())]
        dist.all_gather(shards, parameter.main_grad, group=group)
        prefix = "copy of " if shape.tied and name == OUTPUT else ""
        gradients |= {prefix + hf_name: tensor.clone() for hf_name, tensor in merge(item, shards, shape)}
    return gradients


def reduced_gradients(policy: Policy, batches: Sequence[MicroBatch]) -> Outcome:
    """One pass over this replica's microbatches, and both reductions."""
    make_gradient(policy, batches)
    return whole_gradients(policy), grad_sq_norm(policy)


def make_gradient(policy: Policy, batches: Sequence[MicroBatch]) -> None:
    """The same, left in `main_grad`; the distributed optimizer leaves it in this rank's part."""
    parallel = policy.parallel
    policy.zero_grad()
    run_schedule(policy, batches[parallel.dp_rank :: parallel.dp_size], weighted_logprob_loss(policy))
    reduce_model_parallel_grads(policy)
    reduce_data_parallel_grads(policy)


def assert_outcomes(outcomes: Sequence[Outcome], reference: Mapping[str, Tensor], case: object) -> None:
    """Every rank's gradients and norm are the oracle's, and no parameter is missing."""
    seen = set()
    norm = sum(float(gradient.square().sum()) for gradient in reference.values())
    for gradients, sq_norm in outcomes:
        for name, gradient in gradients.items():
            assert_close(gradient, reference[name.removeprefix("copy of ")], (case, name))
            seen.add(name.removeprefix("copy of "))
        assert sq_norm == pytest.approx(norm, rel=1e-10), case
    assert seen == reference.keys(), case


def assert_close(actual: Tensor, expected: Tensor, name: object, rtol: float = 1e-10) -> None:
    """Largest difference within rtol of the largest value."""
    difference = (actual - expected).abs().max()
    assert difference <= rtol * expected.abs().max(), (name, float(difference), float(expected.abs().max()))
