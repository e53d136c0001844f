"""What the distributed tests of the passes share: samples, policies, and gradients gathered to Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig
from oblr_megatron.model.logprobs import vocab_parallel_logprobs
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.qwen3 import Policy, build_policy
from oblr_megatron.types import MicroBatch
from oblr_megatron.weights.names import OUTPUT, ModelShape, entry, merge
from tests.tiny import VOCAB

TEMPERATURE = 0.7
COEFFICIENTS = torch.tensor([0.5, -1.25, 0.75, 2.0], dtype=torch.float64)
PROMPT = 3  # tokens before the response


def load_policy(path: Path, parallel: Parallel, **model: object) -> Policy:
    config = ModelConfig.model_validate({"path": path, "dtype": "float64"} | model)
    policy = build_policy(Qwen3Config.from_pretrained(path), config, parallel)
    load_hf_weights(policy, path)
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


def weighted_logprob_loss(policy: Policy) -> Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
    """sum_n c_n sum_t log pi(o_t); the metric is each row's unweighted sum."""

    def loss_fn(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.labels.shape == logits.shape[:2]
        logprobs = vocab_parallel_logprobs(
            logits, batch.labels, vocab_size=policy.vocab_size, parallel=policy.parallel, temperature=TEMPERATURE
        )
        sums = logprobs.masked_fill(~batch.mask, 0.0).sum(-1)
        return (COEFFICIENTS[batch.sample_index] * sums).sum(), {"sums": sums.detach()}

    return loss_fn


def whole_gradients(policy: Policy) -> dict[str, Tensor]:
    """This stage's main_grad by Hugging Face name; the last stage's copy of a tied embedding as "copy of ..."."""
    parallel, shape = policy.parallel, ModelShape.of(policy.hf_config)
    gradients = {}
    for name, parameter in policy.named_parameters():
        item = entry(name, shape)
        shards = [torch.empty_like(parameter.main_grad) for _ in range(parallel.tp_size)]
        dist.all_gather(shards, parameter.main_grad, group=parallel.tp_group)
        prefix = "copy of " if shape.tied and name == OUTPUT else ""
        gradients |= {prefix + hf_name: tensor.clone() for hf_name, tensor in merge(item, shards, shape)}
    return gradients


def assert_close(actual: Tensor, expected: Tensor, name: object, rtol: float = 1e-10) -> None:
    """Largest difference within rtol of the largest value."""
    difference = (actual - expected).abs().max()
    assert difference <= rtol * expected.abs().max(), (name, float(difference), float(expected.abs().max()))
