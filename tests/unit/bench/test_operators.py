"""The profile of a step by operator."""

from __future__ import annotations

import torch
from operators import operators_of


def test_the_calls_of_an_operator_are_counted_in_all_shapes() -> None:
    left, right = torch.randn(8, 16), torch.randn(16, 4)
    found = operators_of(lambda: [left @ right, left @ right, left.T @ left], torch.device("cpu"))
    (product,) = [one for one in found if one.name == "aten::mm"]
    assert product.calls == 3 and product.seconds > 0
