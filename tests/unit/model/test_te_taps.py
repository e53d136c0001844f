"""`HandOver`: the factors that Transformer Engine puts into a layer's `wgrad_store` reach the sink.

The tests put the factors as its backward does, with a real tap and a real sink. Not covered: Transformer Engine itself,
which needs CUDA (tests/gpu); norms from these factors (tests/distributed/test_te_taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from oblr_megatron.model.taps import AccumulateSink, Splits, Tap
from oblr_megatron.model.te_taps import HandOver, _can_be_tapped, install_te


class Recorder(AccumulateSink):
    """Adds to main_grad as training does, and records its arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Parameter, Tensor, Tensor, Splits | None]] = []

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        super().linear(weight, x, dy, splits)
        self.seen.append((weight, x, dy, splits))


def weights(count: int, width: int, out: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(out, width, dtype=torch.float64)) for _ in range(count)]
    for weight in made:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    return made


def put(store: HandOver, factors: Sequence[Any]) -> Recorder:
    """Put the factors with a sink other than training's; the product must not be computed."""
    sink = Recorder()

    def product(*_: Any) -> None:
        raise AssertionError("the product was computed")

    with store.tap.into(sink):
        assert store.delay_wgrad_compute()
        store.put(factors, product)
    return sink


def test_transformer_engine_multiplies_in_ordinary_training() -> None:
    tap = Tap()
    store = HandOver(tap, weights(1, 4, 3), 1, [None], own_outputs=True)
    assert not store.delay_wgrad_compute()
    with tap.into(Recorder()):
        assert store.delay_wgrad_compute()
        with tap.into(None):  # as for a filler in the interleaved schedule
            assert not store.delay_wgrad_compute()
    assert not store.delay_wgrad_compute()


@pytest.mark.parametrize("flat", [True, False], ids=["tokens", "rows"])
def test_tokens_of_several_rows_are_separated(flat: bool) -> None:
    x, dy = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    (weight,) = weights(1, 4, 3)
    factors = [x.flatten(0, 1) if flat else x, dy.flatten(0, 1)]
    (found,) = put(HandOver(Tap(), [weight], 2, [None], own_outputs=True), factors).seen
    assert found[0] is weight and found[3] is None
    assert torch.equal(found[1], x) and torch.equal(found[2], dy)
    torch.testing.assert_close(weight.main_grad, torch.einsum("tbp,tbd->pd", dy, x))


def test_a_bias_gets_the_sum_over_tokens() -> None:
    x, dy = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    (weight,) = weights(1, 4, 3)
    bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    bias.main_grad = torch.zeros_like(bias)  # type: ignore[attr-defined]
    put(HandOver(Tap(), [weight], 2, [None], own_outputs=False, bias=bias), [x, dy])
    torch.testing.assert_close(bias.main_grad, dy.sum(0))
    torch.testing.assert_close(weight.main_grad, dy.t() @ x)


@pytest.mark.parametrize(
    ("layer", "tapped"),
    [
        ({"apply_bias": True, "gemm_bias_unfused_add": False}, True),  # column-parallel
        ({"apply_bias": True, "gemm_bias_unfused_add": True}, False),  # row-parallel: added after the reduction
        ({"apply_bias": False, "gemm_bias_unfused_add": False}, False),  # returned to the caller
        ({"apply_bias": True, "gemm_bias_unfused_add": False, "num_gemms": 2}, False),
    ],
)
def test_only_a_bias_of_the_product_is_tapped(layer: dict[str, Any], tapped: bool) -> None:
    store = SimpleNamespace(delay_wgrad_compute=lambda: False)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    assert _can_be_tapped(SimpleNamespace(wgrad_store=store, use_bias=True, **layer), config) is tapped


@pytest.mark.parametrize("own_outputs", [True, False])
def test_each_expert_of_a_grouped_layer(own_outputs: bool) -> None:
    """An expert without tokens is passed too (other ranks may wait in its all-reduce); a frozen one is not.

    The layer's own output memory goes to autograd and must be zero; `main_grad` memory must stay unchanged.
    """
    experts = weights(3, 4, 2)
    experts[2].requires_grad_(False)
    splits: list[Splits] = [[(0, 1), (1, 2)], [(0, 0), (1, 0)], [(0, 4), (1, 0)]]
    x, dy = ([torch.randn(n, width, dtype=torch.float64) for n in (3, 0, 4)] for width in (4, 2))
    outputs = [torch.full((2, 4), float("nan")) for _ in experts]
    seen = put(HandOver(Tap(), experts, None, splits, own_outputs), [x, dy, outputs]).seen
    assert [(id(weight), len(own_x), len(own_dy), cut) for weight, own_x, own_dy, cut in seen] == [
        (id(experts[0]), 3, 3, splits[0]),
        (id(experts[1]), 0, 0, splits[1]),
    ]
    torch.testing.assert_close(experts[0].main_grad, dy[0].t() @ x[0])
    assert not experts[1].main_grad.any() and not experts[2].main_grad.any()
    assert all(output.eq(0).all() if own_outputs else output.isnan().all() for output in outputs)


@pytest.mark.parametrize(
    ("layer", "environment", "packed"),
    [
        ({"num_gemms": 2}, None, False),
        ({"num_gemms": 2}, "0", False),
        ({"num_gemms": 2}, "1", True),
        ({"num_gemms": 2, "use_grouped_tensor": True}, None, True),
        ({}, "1", False),  # not a grouped layer
    ],
)
def test_experts_in_one_tensor_are_left_to_autograd(
    layer: dict[str, Any], environment: str | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", raising=False)
    if environment is not None:
        monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", environment)
    store = SimpleNamespace(delay_wgrad_compute=lambda: False)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    assert _can_be_tapped(SimpleNamespace(wgrad_store=store, use_bias=False, **layer), config) is not packed


def test_a_quantised_factor_is_refused() -> None:
    """Transformer Engine's quantised tensors are subclasses of Tensor, or not tensors at all."""
    quantised = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(AssertionError, match="Parameter"):
        put(HandOver(Tap(), weights(1, 4, 3), 1, [None], own_outputs=False), [quantised, torch.zeros(2, 3)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may have such layers (tests/gpu)")
def test_without_transformer_engine_nothing_is_tapped() -> None:
    tap = Tap()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    install_te(nn.Sequential(nn.Linear(4, 4)), tap, config, {})
    assert tap.weights == set()
