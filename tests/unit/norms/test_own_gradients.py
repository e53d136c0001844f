"""`main_grad` of a model without a wrapper. The passes through it: test_library.py, tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oblr_megatron.norms.own_gradients import OwnGradients


@pytest.mark.parametrize("summed", [False, True])
def test_autograd_may_bring_a_gradient_of_a_tapped_parameter(summed: bool) -> None:
    """Transformer Engine's grouped experts bring zeros, also where the tap has taken the factors."""
    chunk = OwnGradients(nn.Linear(3, 2, dtype=torch.float64))
    weight, bias = chunk.module.weight, chunk.module.bias
    with chunk.held({id(weight)}, summed=summed):
        chunk(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        assert weight.grad is None and bool((bias.main_grad == 4).all())
        assert bool((weight.main_grad == (4 if summed else 0)).all())
    assert (weight.grad is not None) == summed
