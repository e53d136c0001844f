"""Clipped ratios give the gradients of the published losses, which autograd differentiates here.

The formulas are those of PPO with a dual clip, GSPO and CISPO, as verl documents them. TRL's own code is compared in
tests/unit/studies/test_trl_clipping.py. Not covered: layouts (tests/distributed/test_updates.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oblr_megatron.algo.clipping import clipped_ratios
from oblr_megatron.config.algo import AlgoConfig

ROWS, LENGTH = 12, 9
CASES: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "clip-higher": {"clip_low": 0.2, "clip_high": 0.28},
    "one side": {"clip_high": 0.28},
    "dual": {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 1.4},
    "gspo": {"ratio": "sequence", "clip_low": 0.08, "clip_high": 0.1},
    "gspo, dual": {"ratio": "sequence", "clip_low": 0.08, "clip_high": 0.1, "clip_dual": 1.15},
    "cispo": {"surrogate": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo, upper bound only": {"surrogate": "cispo", "clip_high": 0.3},
    "cispo, sequences": {"surrogate": "cispo", "ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1},
}


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log pi, log pi_old, mask [b, t], A [b]; one row has no response, rows end at different places."""
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    new = old + 0.35 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    lengths[4] = 0
    mask = torch.arange(LENGTH) < lengths[:, None]
    return new, old, mask, torch.randn(ROWS, generator=generator, dtype=torch.float64)


def published_loss(new: Tensor, old: Tensor, mask: Tensor, advantages: Tensor, options: dict[str, Any]) -> Tensor:
    """The sum over tokens of the loss, of which only the gradient with respect to `new` is compared."""
    low, high = options.get("clip_low", math.inf), options.get("clip_high", math.inf)
    total = new.new_zeros(())
    for row in range(ROWS):
        on = mask[row]
        if not bool(on.any()):
            continue
        logs, each = (new - old)[row][on], new[row][on]
        if options.get("ratio") == "sequence":  # s_t = sg(s) * pi / sg(pi), s the geometric mean
            logs = each - each.detach() + logs.mean().detach()
        ratios = logs.exp()
        bounded = ratios.clamp(1 - low, 1 + high)
        if options.get("surrogate") == "cispo":
            total = total - (bounded.detach() * advantages[row] * each).sum()
            continue
        losses = torch.maximum(-advantages[row] * ratios, -advantages[row] * bounded)
        if "clip_dual" in options and advantages[row] < 0:
            losses = torch.minimum(losses, -advantages[row] * options["clip_dual"])
        total = total + losses.sum()
    return total


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_published_loss(case: str) -> None:
    new, old, mask, advantages = inputs()
    new.requires_grad_()
    (wanted,) = torch.autograd.grad(published_loss(new, old, mask, advantages, CASES[case]), new)
    spread = advantages[:, None].expand(mask.shape)
    found = clipped_ratios(new, old, mask, spread, AlgoConfig(**CASES[case]))
    torch.testing.assert_close(-spread * found.weights, wanted, rtol=1e-12, atol=0)
    assert not found.weights.requires_grad and not bool(found.clipped[~mask].any())
    share = float(found.clipped.sum() / mask.sum())
    assert share == 0 if case == "unclipped" else 0.02 < share < 0.9, share
    assert bool(found.beyond_dual.any()) == ("dual" in case)


def test_counts_are_those_of_the_branches() -> None:
    """Which branch of the maximum a token takes; with a negative advantage, whether the dual bound cuts it."""
    new, old, mask, advantages = inputs()
    options = CASES["dual"]
    found = clipped_ratios(new, old, mask, advantages[:, None].expand(mask.shape), AlgoConfig(**options))
    for row in range(ROWS):
        for t in range(LENGTH):
            r, a = math.exp(float(new[row, t] - old[row, t])), float(advantages[row])
            clipped = -a * min(max(r, 0.8), 1.2) > -a * r
            assert bool(found.clipped[row, t]) == (bool(mask[row, t]) and clipped)
            assert bool(found.beyond_dual[row, t]) == (bool(mask[row, t]) and a < 0 and r > options["clip_dual"])


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_odd_log_probs(ratio: str) -> None:
    """Impossible before and now: 1. Impossible now: 0, for the response too. NaN stays."""
    new = torch.tensor([[-math.inf, -1.0], [-math.inf, -1.0], [math.nan, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-math.inf, -1.0], [-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    algo = AlgoConfig(ratio=ratio, clip_low=0.2, clip_high=0.2)
    found = clipped_ratios(new, old, torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2), algo).weights
    whole = ratio == "sequence"
    assert found[0].tolist() == [1, 1] and found[1].tolist() == [0, 0 if whole else 1]
    assert found[2].isnan().tolist() == [True, whole]


def test_packed_samples_have_the_weights_of_rows() -> None:
    new, old, mask, advantages = inputs()
    algo = AlgoConfig(**CASES["gspo"])
    spread = advantages[:, None].expand(mask.shape)
    rows = clipped_ratios(new, old, mask, spread, algo)
    flat = [values.reshape(1, -1) for values in (new, old, mask, spread)]
    offsets = torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)
    packed = clipped_ratios(*flat, algo, cu_seqlens=offsets)
    torch.testing.assert_close(packed.weights.view(ROWS, LENGTH), rows.weights, rtol=1e-14, atol=0)
    assert torch.equal(packed.clipped.view(ROWS, LENGTH), rows.clipped)
