"""Opacus's ghost norms and weighted gradient, as the benchmark calls them, equal the oracle's.

Not covered: time and memory, which the benchmark measures.
"""

from __future__ import annotations

import pytest
import torch
from opacus_ghost import GhostTrainer, Rows, build_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from oblr_megatron.config import OptimizerConfig
from oblr_megatron.norms.oracle import oracle_gradient, oracle_sq_norms
from oblr_megatron.types import Sample
from tests.tiny import VOCAB, tiny_config

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def random_samples(count: int = 3, prompt: int = 4, response: int = 9) -> list[Sample]:
    """Samples of few different tokens, so that most occur more than once."""
    draws = torch.randint(VOCAB // 4, (count, prompt + response), generator=torch.Generator().manual_seed(1)).tolist()
    return [Sample(0, tuple(row[:prompt]), tuple(row[prompt:]), (-1.0,) * response, "", "length", 0) for row in draws]


def make_trainer(dtype: torch.dtype, lr: float = 1e-3) -> tuple[Qwen3ForCausalLM, GhostTrainer]:
    """A model with large random weights, and its trainer."""
    torch.manual_seed(0)
    model = build_model(tiny_config(), dtype, CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model, GhostTrainer(model, OptimizerConfig(), lr)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_norms_are_the_oracles(dtype: torch.dtype, one_by_one: bool) -> None:
    """All parameters are covered: embedding, linear layers, head, RMSNorm, q and k norms."""
    model, trainer = make_trainer(dtype)
    samples = random_samples()
    rows = Rows.of(samples, CPU)
    norms = trainer.sq_norms(rows.split() if one_by_one else [rows])
    wide = {name: parameter.double() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(norms, oracle_sq_norms(wide, tiny_config(), samples), rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradient_is_weighted_by_the_rule(one_by_one: bool) -> None:
    """-sum_i c_i s_i: by the second backward with c from the norms, and by the plain step with given c."""
    samples = random_samples()
    rows = Rows.of(samples, CPU)
    batches = rows.split() if one_by_one else [rows]
    model, trainer = make_trainer(torch.float64)
    weights = dict(model.named_parameters())
    norms = oracle_sq_norms(weights, tiny_config(), samples)
    coefficients = rule(norms)
    scores = [oracle_gradient(weights, tiny_config(), sample) for sample in samples]
    expected = {name: -sum(c * score[name] for c, score in zip(coefficients, scores, strict=True)) for name in weights}
    trainer.ghost_gradient(batches, rule)
    check_gradients(model, expected)
    model.zero_grad()
    trainer.plain_gradient(batches, coefficients)
    check_gradients(model, expected)


def test_update_steps_and_clears() -> None:
    """Adam's first step has length lr in every weight, whatever the gradient's scale."""
    model, trainer = make_trainer(torch.float64, lr=1e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.ghost_gradient([Rows.of(random_samples(), CPU)], rule)
    trainer.update()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert (parameter - before[name]).abs().max() <= 1e-3 * (1 + 1e-6), name
    assert (model.lm_head.weight - before["lm_head.weight"]).abs().min() > 0


def rule(sq_norms: Tensor) -> Tensor:
    """Some weights of both signs."""
    return sq_norms / sq_norms.sum() - 0.4


def check_gradients(model: Qwen3ForCausalLM, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: n + m)
