"""The output layer in blocks equals log_softmax of whole logits: log-probs, entropies, energies, and both gradients.

Padding takes no part. 37 tokens are padded to 64 or to 128. On 4 ranks the last rank, or the last two, hold nothing but
padding, and the logits there are the largest of all. Blocks have one to all columns; forward keeps none, some or all.
With the smaller padding each position has three further tokens, often the label among them. In filtered cases most
positions have few tokens that could be drawn, and the others have no probability.

Not covered: norms and gradients of models (test_gradnorm_layouts.py and others, all with several blocks), CUDA.
"""

from __future__ import annotations

import itertools

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
CASES = [  # dtype of the factors, of the logits, scale of the logits, tolerance; the first two are of filtered draws
    (F64, F64, 1.0, 1e-12),
    (F32, F32, 3.0, 1e-5),
    (F64, F64, 1.0, 1e-12),
    (F64, F64, 1e4, 1e-9),  # exp() of any score alone would overflow
    (F32, F32, 3.0, 1e-5),
    (F32, F32, 20.0, 1e-4),  # nearly deterministic: an energy is a small difference of large numbers
    (BF16, F32, 3.0, 1e-5),  # exact products of the rounded factors
    (BF16, BF16, 3.0, 0.1),  # logits up to 16 are rounded to 0.06
]
FILTERED = 2
BLOCKS = [(10**9, 10**9), (3 * ROWS * LENGTH, 5 * ROWS * LENGTH), (1, 0)]  # logits of a block, logits kept
TEMPERATURE = 0.7


def inputs(padded: int, dtype: torch.dtype, scale: float, filtered: bool) -> tuple[Tensor, Tensor, MicroBatch, Tensor]:
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
    if filtered:  # at most six tokens could be drawn, and the label is not always among them; else all could
        batch.recorded_ids = torch.rand(ROWS, LENGTH, VOCAB, generator=generator).argsort(-1)[..., :6].int()
        batch.recorded_logprobs = torch.full((ROWS, LENGTH, 6), -torch.inf)
        batch.recorded_logprobs[..., :4] = -1.0
        batch.supported = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
    return hidden, weight, batch, torch.randn(ROWS, LENGTH, generator=generator, dtype=F64)


def further(padded: int, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Tokens [b, t, 3] that differ at each position, with the label in a third of them, and weights of their sum."""
    generator = torch.Generator().manual_seed(padded + 1)
    others = torch.rand(ROWS, LENGTH, VOCAB, generator=generator).argsort(-1)[..., :3]
    labels = batch.labels.masked_fill(~batch.mask, 0)[..., None]
    take = (torch.rand(ROWS, LENGTH, 1, generator=generator) < 1 / 3) & (others != labels).all(-1, keepdim=True)
    others = torch.where(torch.arange(3) == 1, torch.where(take, labels, others), others)
    others = others if batch.recorded_ids is None else batch.recorded_ids[..., :3].long()
    return others, torch.randn(ROWS, LENGTH, 3, generator=generator, dtype=F64)


def all_cases(padded: int) -> list[list[tuple[Tensor, ...]]]:
    with layout(tp=dist.get_world_size()) as parallel:
        return [
            [shard_results(parallel, padded, number < FILTERED, *case[:3], *sizes) for sizes in BLOCKS]
            for number, case in enumerate(CASES)
        ]


def shard_results(
    parallel: Parallel,
    padded: int,
    filtered: bool,
    dtype: torch.dtype,
    of_logits: torch.dtype,
    scale: float,
    *sizes: int,
) -> tuple[Tensor, ...]:
    """Log-probs, entropy, energy, gradients of the hidden states and this rank's rows of the weight, further tokens."""
    hidden, weight, batch, weights = inputs(padded, dtype, scale, filtered)
    hidden.requires_grad_()
    shard = nn.Parameter(weight.chunk(parallel.tp_size)[parallel.tp_rank].clone())
    head = LMHead(shard, VOCAB, parallel, Tap(), of_logits, *sizes)
    others, of_others = further(padded, batch)
    asked = others if padded == 64 else None
    scores = head(hidden, batch, temperature=TEMPERATURE, entropy=True, energy=True, others=asked)
    total = (scores.logprobs * weights.to(scores.logprobs.dtype)).sum()
    if scores.others is not None:
        total = total + (scores.others * of_others.to(scores.logprobs.dtype)).sum()
    total.backward()
    assert hidden.grad is not None and shard.grad is not None
    values = (one.detach() for one in scores if one is not None)
    return *itertools.islice(values, 3), hidden.grad, shard.grad, *values


def reference(padded: int, dtype: torch.dtype, scale: float, filtered: bool) -> tuple[Tensor, ...]:
    """The same over the real vocabulary in fp64, by torch."""
    hidden, weight, batch, weights = inputs(padded, dtype, scale, filtered)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    labels = batch.labels.masked_fill(~batch.mask, 0)
    scores = (x @ w.t())[..., :VOCAB] / TEMPERATURE
    if filtered:
        assert batch.recorded_ids is not None and batch.supported is not None
        possible = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, batch.recorded_ids[..., :4].long(), True)
        possible.scatter_(-1, labels[..., None], True)
        scores = scores.masked_fill(~possible & batch.supported[..., None], -1e300)
    whole = scores.log_softmax(-1)
    chosen = whole.gather(-1, labels[..., None])[..., 0] * batch.mask
    others, of_others = further(padded, batch)
    at_others = whole.gather(-1, others) * batch.mask[..., None]
    further_ones = [at_others] if padded == 64 else []
    ((chosen * weights).sum() + sum((one * of_others).sum() for one in further_ones)).backward()
    score = nn.functional.one_hot(labels, VOCAB) - whole.exp()
    entropy, energy = -(whole.exp() * whole).sum(-1), (score / TEMPERATURE).square().sum(-1)
    values = (chosen.detach(), (entropy * batch.mask).detach(), (energy * batch.mask).detach())
    return *values, x.grad, w.grad, *(one.detach() for one in further_ones)


@pytest.mark.parametrize("padded", [64, 128])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_log_softmax(world_size: int, padded: int) -> None:
    ranks = run_ranks(all_cases, world_size, padded)
    for case, (dtype, _, scale, rtol) in enumerate(CASES):
        expected = reference(padded, dtype, scale, case < FILTERED)
        for sizes in range(len(BLOCKS)):
            results = [rank[case][sizes] for rank in ranks]
            check(results, expected, dtype, rtol)


def check(ranks: list[tuple[Tensor, ...]], expected: tuple[Tensor, ...], dtype: torch.dtype, rtol: float) -> None:
    for scores in ranks:
        for actual, wanted, factor in zip(scores[:3], expected[:3], (1, 10, 10), strict=True):
            assert actual.dtype == (F64 if dtype == F64 else F32)
            torch.testing.assert_close(actual.double(), wanted, rtol=factor * rtol, atol=factor * rtol)
        if dtype == F32:  # also where a token is nearly certain
            torch.testing.assert_close(scores[2].double(), expected[2], rtol=1e-3, atol=1e-10)
        assert (scores[2] >= 0).all() and len(scores) == len(expected)
        for actual, wanted in zip(scores[5:], expected[5:], strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=rtol, atol=rtol)
    dw = torch.cat([scores[4] for scores in ranks]).double()
    assert not dw[VOCAB:].any()
    rounding = rtol if dtype != BF16 else max(rtol, 2.0**-6)  # of dy, of each block's products and of their sum
    for actual, wanted in (*((scores[3].double(), expected[3]) for scores in ranks), (dw, expected[4])):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=10 * rounding * float(wanted.abs().max()))
