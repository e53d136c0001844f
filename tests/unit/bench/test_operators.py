"""The profile's arithmetic on operators with known FLOPs and bytes."""

from __future__ import annotations

import torch
from operators import Operator, Rates, operators_of
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")


def found(step: object, name: str) -> Operator:
    return next(operator for operator in operators_of(step, CPU) if operator.name == f"aten::{name}")


def test_products_are_counted() -> None:
    """2 m k n FLOPs, and the bytes of both factors, for each call."""
    left, right, total = torch.randn(8, 16), torch.randn(16, 4), torch.zeros(8, 4)
    product = found(lambda: [left @ right for _ in range(3)], "mm")
    assert (product.calls, product.flops, product.read_bytes) == (3, 3 * 2 * 8 * 16 * 4, 3 * 4 * (8 * 16 + 16 * 4))
    assert found(lambda: total.addmm_(left, right), "addmm_").flops == 2 * 8 * 16 * 4
    assert found(lambda: torch.bmm(left[None], right[None]), "bmm").flops == 2 * 8 * 16 * 4


def test_causal_attention_is_half_of_its_products() -> None:
    """Two products of [t, t] by head_dim forward, five backward."""
    query, key = torch.randn(2, 4, 32, 16, requires_grad=True), torch.randn(2, 2, 32, 16)
    product = 2 * 2 * 4 * 32 * 32 * 16 / 2

    def attend() -> None:
        scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).sum().backward()

    assert found(attend, "_scaled_dot_product_flash_attention_for_cpu").flops == 2 * product
    assert found(attend, "_scaled_dot_product_flash_attention_for_cpu_backward").flops == 5 * product


def test_an_operator_is_bounded_by_what_takes_longer() -> None:
    rates = Rates(flops=1e9, read_bytes=1e9)
    assert rates.bound(Operator("mm", 1, 1.0, flops=2e9, read_bytes=1e9)) == "FLOPs"
    assert rates.bound(Operator("mm", 1, 1.0, flops=1e9, read_bytes=2e9)) == "bytes"
    assert rates.bound(Operator("node", 1, 1.0, flops=0, read_bytes=0)) == ""
