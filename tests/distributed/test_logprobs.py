"""Log-probs, entropies and energies over a split vocabulary equal those of log_softmax over the real one.

Padding takes no part. 37 tokens are padded to 64 or to 128. On 4 ranks the last rank, or the last two, hold nothing but
padding, and the logits there are the largest of all.

Not covered: speed, memory, CUDA.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oblr_megatron.model.logprobs import vocab_parallel_energy, vocab_parallel_entropy, vocab_parallel_logprobs
from oblr_megatron.model.parallel import Parallel
from tests.distributed.launch import layout, run_ranks
from tests.tiny import VOCAB

ROWS, LENGTH = 16, 5
CASES = [  # padded vocabulary, dtype, scale of the logits, tolerance
    (padded, dtype, scale, rtol)
    for padded in (64, 128)
    for dtype, scale, rtol in (
        (torch.float64, 1.0, 1e-12),
        (torch.float64, 1e4, 1e-9),  # exp() of any score alone would overflow
        (torch.float32, 3.0, 1e-5),
        (torch.float32, 20.0, 1e-4),  # nearly deterministic: rounding could make an energy negative
        (torch.bfloat16, 3.0, 1e-5),  # the logits are rounded, the log-probs of the rounded logits are not
    )
]
TEMPERATURE = 0.7


def inputs(padded: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [b, t, Vp] with huge padding, labels that include the first and last token, weights of the sum."""
    generator = torch.Generator().manual_seed(padded)
    logits = (scale * torch.randn(ROWS, LENGTH, padded, generator=generator, dtype=torch.float64)).to(dtype)
    logits[..., VOCAB:] = 2 * scale * 5
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCAB - 1
    labels[ROWS // 2 :] = logits[ROWS // 2 :, :, :VOCAB].argmax(-1)
    return logits, labels, torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)


def all_cases() -> list[tuple[Tensor, ...]]:
    with layout(tp=dist.get_world_size()) as parallel:
        return [shard_results(parallel, *case) for *case, _ in CASES]


def shard_results(parallel: Parallel, padded: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
    """Log-probs, entropy, this rank's gradient, that of a second backward through the same graph, and energies."""
    logits, labels, weights = inputs(padded, dtype, scale)
    local = logits.chunk(parallel.tp_size, dim=-1)[parallel.tp_rank].clone().requires_grad_()
    options = {"vocab_size": VOCAB, "parallel": parallel, "temperature": TEMPERATURE}
    logprobs = vocab_parallel_logprobs(local, labels, **options)
    loss = (logprobs * weights.to(logprobs.dtype)).sum()
    loss.backward(retain_graph=True)
    first, local.grad = local.grad, None
    loss.backward()
    energy = vocab_parallel_energy(local, labels, **options)
    return logprobs.detach(), vocab_parallel_entropy(local, **options), first, local.grad, energy


def reference(padded: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, gradient and energies over the real vocabulary in fp64, by torch."""
    logits, labels, weights = inputs(padded, dtype, scale)
    exact = logits.double().requires_grad_()
    whole = (exact[..., :VOCAB] / TEMPERATURE).log_softmax(-1)
    chosen = whole.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    (chosen * weights).sum().backward()
    score = torch.nn.functional.one_hot(labels, VOCAB) - whole.exp()
    energy = (score / TEMPERATURE).square().sum(-1).detach()
    return chosen.detach(), -(whole.exp() * whole).sum(-1).detach(), exact.grad, energy


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_to_log_softmax(world_size: int) -> None:
    ranks = run_ranks(all_cases, world_size)
    for index, (padded, dtype, scale, rtol) in enumerate(CASES):
        logprobs, entropy, gradient, energy = reference(padded, dtype, scale)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for actual, actual_entropy, first, second, actual_energy in (rank[index] for rank in ranks):
            assert actual.dtype == actual_entropy.dtype == wide
            assert first.dtype == dtype
            assert torch.equal(first, second)
            torch.testing.assert_close(actual.double(), logprobs, rtol=rtol, atol=rtol)
            torch.testing.assert_close(actual_entropy.double(), entropy, rtol=10 * rtol, atol=10 * rtol)
            assert (actual_energy >= 0).all()
            torch.testing.assert_close(actual_energy.double(), energy, rtol=10 * rtol, atol=10 * rtol)
        whole = torch.cat([rank[index][2] for rank in ranks], dim=-1).double()
        assert not whole[..., VOCAB:].any()
        grad_rtol = 2.0**-8 if dtype == torch.bfloat16 else 10 * rtol  # rounded once
        torch.testing.assert_close(whole, gradient, rtol=grad_rtol, atol=1e-12 if wide == torch.float64 else 1e-6)
