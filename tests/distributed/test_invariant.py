"""The trainer under model.batch_invariant: logits with the same bits in every layout, and exact norms.

Not covered: the engine's side (tests/e2e/test_zero_mismatch.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.optimizer import grad_sq_norm
from tests.distributed.gradnorm_cases import sample_sq_grad_norms
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    ORDERS,
    TEMPERATURE,
    load_policy,
    logits_by_position,
    make_batches,
    make_gradient,
    packed_batches,
)
from tests.oracle import load_oracle, oracle_gradients
from tests.tiny import make_hf_dir

RECOMPUTED = ParallelConfig(recompute_granularity="full")
LAYOUTS: tuple[dict[str, int], ...] = ({"pp": 2}, {"cp": 2}, {})


def two_ranks(path: Path) -> dict[str, Any]:
    """Logits of single samples and of packed ones, and norms, in every layout."""
    found: dict[str, Any] = {}
    for sizes in LAYOUTS:
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel, RECOMPUTED, dtype="float32", batch_invariant=True)
            found[str(sizes)] = [logits_by_position(policy, part()) for part in (make_batches, packed_batches)]
            if sizes == {"pp": 2}:
                found["norms"] = norms_of(load_policy(path, parallel, batch_invariant=True))
    return found


def norms_of(policy: Any) -> tuple[Tensor, Tensor]:
    """Squared norms of the samples' scores: by taps in one packed pass, and from a gradient of each."""
    alone = []
    for batch, coefficient in zip(make_batches(), COEFFICIENTS.tolist(), strict=True):
        make_gradient(policy, [batch])
        alone.append(grad_sq_norm(policy) / coefficient**2)
    together = sample_sq_grad_norms(policy, packed_batches()[:2], temperature=TEMPERATURE)
    return together, torch.tensor(alone, dtype=torch.float64)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_layouts_have_the_same_bits_and_norms_are_exact(family: str, tmp_path: Path) -> None:
    """Pipeline, context and data parallelism, packed or not, with full recomputation; biases in "qwen2"."""
    path = make_hf_dir(tmp_path / "model", family=family)
    ranks = run_ranks(two_ranks, 2, path)
    single = [logits for _, logits in ranks[0]["{}"][0]]
    for case in map(str, LAYOUTS):
        for rank in ranks:
            for kind, found in enumerate(rank[case]):
                for index, (positions, logits) in enumerate(found or ()):
                    expected = single[index] if kind == 0 else torch.cat([single[n] for n in ORDERS[index]], 1)
                    real = positions > 0
                    assert torch.equal(logits[:, real], expected[:, positions[real] - 1]), (case, kind, index)
    together, alone = ranks[1]["norms"]
    order = [n for packed in ORDERS[:2] for n in packed]
    torch.testing.assert_close(together, alone[order], rtol=1e-10, atol=0)
    assert together.count_nonzero() == len(order) - order.count(1), "sample 1 has no response"
    gradients = oracle_gradients(load_oracle(path), make_batches()[:1], torch.ones(4), TEMPERATURE)
    assert float(alone[0]) == pytest.approx(sum(float(one.square().sum()) for one in gradients.values()), rel=1e-4)
