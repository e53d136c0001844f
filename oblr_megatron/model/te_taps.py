"""The taps of Transformer Engine's linear layers: the factors of a delayed weight gradient go to the sink.

Transformer Engine can put a weight gradient off. Where a layer's `wgrad_store` says so, backward leaves the product
out and puts x, dy and the function that would multiply them into the store. `HandOver` stands in the store's place and
passes the factors on at that moment: the input is gathered, its gradient on its way to the other ranks, nothing waits.
When the sink is training's own, `HandOver` says no, and Transformer Engine multiplies as it always does, by its own
kernel and with fused accumulation if it is on. So no product is ever delayed, `delay_wgrad_compute` stays off in
megatron-core's configuration, and the hooks on parameters do what they do without taps.

Left to autograd and `main_grad`, which means one sample a microbatch: weights of norms, and what `install_te` returns.
FP8 and FP4 layers are among these. Block-scaled, x and dy are held in two roundings, by rows for the input's gradient
and by columns for the weight's, and `dequantize` gives the rows: the norm would be that of a gradient which training
does not make; and where only columns are left it raises, up to 2.12 at least.

Written against the sources of Transformer Engine 2.3 to 2.20 (megatron-core 0.16 asks for 2.9 to 2.11). Not yet run on
a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from oblr_megatron.model.taps import AccumulateSink, Splits, SplitsFn, Tap

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(slots=True)
class HandOver:
    """What a layer's backward finds as its `wgrad_store`; a new one for every forward.

    Microbatches overlap, so what is known in the forward only (b, whose tokens an expert sees) is kept here.
    """

    tap: Tap
    weights: Sequence[nn.Parameter]  # [p, d] each; a grouped layer has one for each expert
    rows: int | None  # b of the layer's input [t, b, d]; None where the input is tokens [tokens, d]
    splits: Sequence[Splits | None]  # of each weight
    own_outputs: bool  # a grouped layer's products would go to memory of its own, not straight to main_grad

    def delay_wgrad_compute(self) -> bool:
        """Transformer Engine's question before it multiplies."""
        return type(self.tap.sink) is not AccumulateSink

    def put(self, factors: Sequence[Any], product: Callable[..., Any]) -> None:
        """Transformer Engine's way to leave the product out.

        Args:
            factors: x [tokens, d] and dy [tokens, p]; of a grouped layer a list of each, and the list of its outputs.
            product: what would multiply them.
        """
        x, dy, *outputs = factors
        pairs = list(zip(x, dy, strict=True)) if outputs else [(x, dy)]
        for weight, splits, (own_x, own_dy) in zip(self.weights, self.splits, pairs, strict=True):
            kinds = {type(own_x), type(own_dy)}
            assert kinds == {Tensor}, f"factors are {kinds}: quantised, which the configuration does not say"
            if weight.requires_grad:
                self.tap.sink.linear(weight, self._laid_out(own_x), self._laid_out(own_dy), splits)
        if outputs and self.own_outputs:  # autograd is given them, written or not
            for output in outputs[0]:
                output.zero_()

    def _laid_out(self, factor: Tensor) -> Tensor:
        width = factor.shape[-1]
        return factor.reshape(-1, width) if self.rows is None else factor.reshape(-1, self.rows, width)


def install_te(
    module: nn.Module,
    tap: Tap,
    config: TransformerConfig,
    splits: Mapping[nn.Module, Sequence[SplitsFn]] | None = None,
) -> Mapping[str, str]:
    """Tap the Transformer Engine layers of this model chunk, beside `taps.install`. Nothing without CUDA or without it.

    Args:
        module: the model chunk.
        tap: where to.
        config: of the model.
        splits: for the grouped layers of experts, whose tokens each expert is given (`moe.grouped_splits_of`).

    Returns:
        The layers left to autograd, by name, and why.
    """
    left: dict[str, str] = {}
    kinds = _kinds()
    for name, layer in module.named_modules():
        if not isinstance(layer, kinds):
            continue
        obstacle = _obstacle(layer, config)
        if obstacle is not None:
            left[name] = obstacle
            continue
        weights = _weights(layer)
        tap.weights.update(id(weight) for weight in weights)
        layer.register_forward_pre_hook(partial(_renew_store, tap, weights, (splits or {}).get(layer)))
    return left


def _kinds() -> tuple[type[nn.Module], ...]:
    """What megatron-core's `TELinear`, `TELayerNormColumnParallelLinear`, `TEGroupedLinear` and their kin extend."""
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return ()
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    return Linear, LayerNormLinear, GroupedLinear


def _weights(layer: Any) -> list[nn.Parameter]:
    """A grouped layer has no `weight_names`; its weights are numbered."""
    names = getattr(layer, "weight_names", None) or [f"weight{index}" for index in range(layer.num_gemms)]
    return [getattr(layer, name) for name in names]


def _obstacle(layer: Any, config: TransformerConfig) -> str | None:
    """Why the layer's factors cannot be had; None if they can."""
    store = getattr(layer, "wgrad_store", None)
    if store is None:
        return "Transformer Engine is older than 2.3 and keeps no factors"
    quantised = config.fp8 or config.fp4 or getattr(layer, "te_quant_params", None) is not None
    obstacles = {
        "its factors are quantised": quantised,
        "its weight gradients are delayed for another purpose": store.delay_wgrad_compute(),
        "its factors are in buffers that the next layer overwrites (tp_comm_overlap)": config.tp_comm_overlap,
        "its bias's gradient is made with the weight's": layer.use_bias,
        "its weight is made of several": len(getattr(layer, "weight_names", "1")) > 1,
        "its experts' factors are in one tensor (use_grouped_tensor)": getattr(layer, "use_grouped_tensor", False),
    }
    return next((obstacle for obstacle, present in obstacles.items() if present), None)


def _renew_store(
    tap: Tap,
    weights: Sequence[nn.Parameter],
    splits: Sequence[SplitsFn] | None,
    layer: Any,
    inputs: tuple[Any, ...],
) -> None:
    """Before each forward."""
    rows = inputs[0].shape[1] if inputs[0].dim() == 3 else None
    known = [None] * len(weights) if splits is None else [split() for split in splits]
    layer.wgrad_store = HandOver(tap, weights, rows, known, not layer.fuse_wgrad_accumulation)
