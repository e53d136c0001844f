"""The output layer in blocks equals log_softmax of whole logits: log-probs, entropies, energies, and both gradients.

Padding takes no part. 37 tokens are padded to 64 or to 128. On 4 ranks the last rank, or the last two, hold nothing but
padding, and the logits there are the largest of all. Blocks have one to all columns; forward keeps none, some or all.

Not covered: norms and gradients of models (test_gradnorm_layouts.py and others, all with several blocks), CUDA.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from oblr_megatron.model.lm_head import LMHead
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.taps import Tap
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.tiny import VOCAB

ROWS, LENGTH, HIDDEN = 16, 5, 24
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CASES = [  # dtype of the factors, of the logits, scale of the logits, tolerance
    (F64, F64, 1.0, 1e-12),
    (F64, F64, 1e4, 1e-9),  # exp() of any score alone would overflow
    (F32, F32, 3.0, 1e-5),
    (F32, F32, 20.0, 1e-4),  # nearly deterministic: rounding could make an energy negative
    (BF16, F32, 3.0, 1e-5),  # exact products of the rounded factors
    (BF16, BF16, 3.0, 0.1),  # logits up to 16 are rounded to 0.06
]
BLOCKS = [(10**9, 10**9), (3 * ROWS * LENGTH, 5 * ROWS * LENGTH), (1, 0)]  # logits of a block, logits kept
TEMPERATURE = 0.7


def inputs(padded: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, MicroBatch, Tensor]:
    """Hidden states, weight with huge padding, labels that include the first and last token, weights of the sum."""
    generator = torch.Generator().manual_seed(padded)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator, dtype=F64)
    weight = scale / HIDDEN**0.5 * torch.randn(padded, HIDDEN, generator=generator, dtype=F64)
    weight[VOCAB:] *= 10
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCAB - 1
    labels[ROWS // 2 :] = (hidden @ weight.t())[ROWS // 2 :, :, :VOCAB].argmax(-1)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    mask[0, :2], mask[1] = True, False
    batch = MicroBatch(labels, labels.masked_fill(~mask, 10**6), mask, torch.zeros(mask.shape), torch.arange(ROWS))
    return hidden, weight, batch, torch.randn(ROWS, LENGTH, generator=generator, dtype=F64)


def all_cases(padded: int) -> list[list[tuple[Tensor, ...]]]:
    with layout(tp=dist.get_world_size()) as parallel:
        return [[shard_results(parallel, padded, *case[:3], *sizes) for sizes in BLOCKS] for case in CASES]


def shard_results(
    parallel: Parallel, padded: int, dtype: torch.dtype, of_logits: torch.dtype, scale: float, *sizes: int
) -> tuple[Tensor, ...]:
    """Log-probs, entropy, energy, and the gradients of the hidden states and of this rank's rows of the weight."""
    hidden, weight, batch, weights = inputs(padded, dtype, scale)
    hidden.requires_grad_()
    shard = nn.Parameter(weight.chunk(parallel.tp_size)[parallel.tp_rank].clone())
    head = LMHead(shard, VOCAB, parallel, Tap(), of_logits, *sizes)
    scores = head(hidden, batch, temperature=TEMPERATURE, entropy=True, energy=True)
    (scores.logprobs * weights.to(scores.logprobs.dtype)).sum().backward()
    assert hidden.grad is not None and shard.grad is not None
    return *(one.detach() for one in scores), hidden.grad, shard.grad


def reference(padded: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
    """The same over the real vocabulary in fp64, by torch."""
    hidden, weight, batch, weights = inputs(padded, dtype, scale)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    whole = ((x @ w.t())[..., :VOCAB] / TEMPERATURE).log_softmax(-1)
    labels = batch.labels.masked_fill(~batch.mask, 0)
    chosen = whole.gather(-1, labels[..., None])[..., 0] * batch.mask
    (chosen * weights).sum().backward()
    score = nn.functional.one_hot(labels, VOCAB) - whole.exp()
    entropy, energy = -(whole.exp() * whole).sum(-1), (score / TEMPERATURE).square().sum(-1)
    return chosen.detach(), (entropy * batch.mask).detach(), (energy * batch.mask).detach(), x.grad, w.grad


@pytest.mark.parametrize("padded", [64, 128])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_log_softmax(world_size: int, padded: int) -> None:
    ranks = run_ranks(all_cases, world_size, padded)
    for case, (dtype, _, scale, rtol) in enumerate(CASES):
        expected = reference(padded, dtype, scale)
        for sizes in range(len(BLOCKS)):
            results = [rank[case][sizes] for rank in ranks]
            check(results, expected, dtype, rtol)


def check(ranks: list[tuple[Tensor, ...]], expected: tuple[Tensor, ...], dtype: torch.dtype, rtol: float) -> None:
    for scores in ranks:
        for actual, wanted, factor in zip(scores[:3], expected[:3], (1, 10, 10), strict=True):
            assert actual.dtype == (F64 if dtype == F64 else F32)
            torch.testing.assert_close(actual.double(), wanted, rtol=factor * rtol, atol=factor * rtol)
        assert (scores[2] >= 0).all()
    dw = torch.cat([scores[4] for scores in ranks]).double()
    assert not dw[VOCAB:].any()
    rounding = rtol if dtype != BF16 else max(rtol, 2.0**-6)  # of dy, of each block's products and of their sum
    for actual, wanted in (*((scores[3].double(), expected[3]) for scores in ranks), (dw, expected[4])):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=10 * rounding * float(wanted.abs().max()))
