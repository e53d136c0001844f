"""Taps of Transformer Engine's linear layers: the factors of a delayed weight gradient go to the sink.

Transformer Engine can delay a weight gradient. If a layer's `wgrad_store` says so, backward skips the product and puts
x, dy and the function that would multiply them into the store. `HandOver` replaces the store and passes the factors to
the sink at once. At that moment the input is gathered and the reduction of its gradient has started.

With the sink of ordinary training, `HandOver` answers no, and Transformer Engine multiplies with its own kernel, with
fused accumulation if that is on. No product is ever delayed: `delay_wgrad_compute` stays off in megatron-core's
configuration, and parameter hooks work as without taps. The delayed product would also give the gradient of a bias that
the layer adds itself, so `HandOver` passes that to the sink as well.

The weights of norms and the layers that `install_te` skips stay with autograd and `main_grad`, which need one sample
a microbatch. FP8 and FP4 layers are among them. Block scaling keeps two roundings of x and dy, by rows for the input's
gradient and by columns for the weight's. `dequantize` returns the row rounding. Training uses the column rounding, so
the norm would belong to another gradient. If only columns are left, it raises (at least up to 2.12).

Written against the sources of Transformer Engine 2.3 to 2.20. 2.12 ran on an H200 (docs/gpu.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from oblr_megatron.model.precision import this_machine
from oblr_megatron.model.taps import AccumulateSink, Splits, SplitsFn, Tap

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(slots=True)
class HandOver:
    """Replaces a layer's `wgrad_store`; a new one for every forward.

    Forwards of several microbatches may precede a backward, so that this object keeps facts known only in the forward:
    b, and the replicas that an expert's tokens come from.
    """

    tap: Tap
    weights: Sequence[nn.Parameter]  # [p, d] each; a grouped layer has one for each expert
    rows: int | None  # b of the layer's input [t, b, d]; None for an input [tokens, d]
    splits: Sequence[Splits | None]  # of each weight
    own_outputs: bool  # a grouped layer's products would go to separate memory, not directly to main_grad
    bias: nn.Parameter | None = None  # [p], added with the product; a grouped layer has none

    def delay_wgrad_compute(self) -> bool:
        """Whether Transformer Engine should call `put` instead of multiplying."""
        return type(self.tap.sink) is not AccumulateSink

    def put(self, factors: Sequence[Any], product: Callable[..., Any]) -> None:
        """Pass the factors to the sink; Transformer Engine calls this instead of `product`, which multiplies.

        The factors are x [tokens, d] and dy [tokens, p]. A grouped layer puts lists, and that of its outputs.
        """
        x, dy, *outputs = factors
        pairs = list(zip(x, dy, strict=True)) if outputs else [(x, dy)]
        for weight, splits, (own_x, own_dy) in zip(self.weights, self.splits, pairs, strict=True):
            kinds = {type(own_x), type(own_dy)}
            assert kinds == {Tensor}, f"factors are {kinds}: quantised, although the configuration is not"
            if weight.requires_grad:
                self.tap.sink.linear(weight, self._laid_out(own_x), self._laid_out(own_dy), splits)
        if self.bias is not None and self.bias.requires_grad:
            self.tap.sink.scale(self.bias, self._laid_out(dy))
        if outputs and self.own_outputs:  # autograd receives them even if nothing was written
            for output in outputs[0]:
                output.zero_()

    def _laid_out(self, factor: Tensor) -> Tensor:
        width = factor.shape[-1]
        return factor.reshape(-1, width) if self.rows is None else factor.reshape(-1, self.rows, width)


def install_te(
    module: nn.Module, tap: Tap, config: TransformerConfig, splits: Mapping[nn.Module, Sequence[SplitsFn]]
) -> None:
    """Tap the Transformer Engine layers of this model chunk, after `taps.install`. No-op without CUDA or the package.

    `splits` of grouped layers come from `moe.splits_of`.
    """
    kinds = _kinds()
    for layer in module.modules():
        if not isinstance(layer, kinds) or not _can_be_tapped(layer, config):
            continue
        # A grouped layer numbers its weights and has no `weight_names`.
        names = getattr(layer, "weight_names", None) or [f"weight{n}" for n in range(cast(int, layer.num_gemms))]
        weights = [getattr(layer, name) for name in names]
        bias = cast("nn.Parameter | None", layer.bias if layer.use_bias else None)
        tap.weights.update(id(held) for held in (*weights, bias) if held is not None)
        tap.replace(layer, "wgrad_store", layer.wgrad_store)  # `_renew_store` sets another; `Tap.remove` this one
        hook = layer.register_forward_pre_hook(partial(_renew_store, tap, weights, bias, splits.get(layer)))
        tap.undo.append(hook.remove)


def _kinds() -> tuple[type[nn.Module], ...]:
    """The base classes of megatron-core's `TELinear`, `TELayerNormColumnParallelLinear`, `TEGroupedLinear` etc."""
    if this_machine().transformer_engine is None:
        return ()
    from transformer_engine.pytorch import GroupedLinear, LayerNormLinear, Linear

    return Linear, LayerNormLinear, GroupedLinear


def _can_be_tapped(layer: Any, config: TransformerConfig) -> bool:
    """Whether backward can give the layer's factors to the store, as whole tensors that nothing overwrites."""
    store = getattr(layer, "wgrad_store", None)
    if store is None:  # before Transformer Engine 2.3
        return False
    obstacles = (
        config.fp8 or config.fp4 or getattr(layer, "te_quant_params", None) is not None,  # quantised factors
        store.delay_wgrad_compute(),  # for another purpose
        config.tp_comm_overlap,  # the next layer overwrites the factors' buffers
        # A bias must be part of the product, as in a column-parallel layer that does not return it.
        layer.use_bias and (hasattr(layer, "num_gemms") or not layer.apply_bias or layer.gemm_bias_unfused_add),
        len(getattr(layer, "weight_names", "1")) > 1,  # several weights in one
        _in_one_tensor(layer),
    )
    return not any(obstacles)


def _in_one_tensor(layer: Any) -> bool:
    """Whether a grouped layer may keep the factors of all experts in one tensor: asked for as an option, from 2.19 on,
    or by the environment, from 2.17 on.
    """
    asked = os.environ.get("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "0") != "0"
    return getattr(layer, "use_grouped_tensor", False) or (asked and hasattr(layer, "num_gemms"))


def _renew_store(
    tap: Tap,
    weights: Sequence[nn.Parameter],
    bias: nn.Parameter | None,
    splits: Sequence[SplitsFn] | None,
    layer: Any,
    inputs: tuple[Any, ...],
) -> None:
    """Forward pre-hook: give the layer a new `HandOver`."""
    rows = inputs[0].shape[1] if inputs[0].dim() == 3 else None
    known = [None] * len(weights) if splits is None else [split() for split in splits]
    layer.wgrad_store = HandOver(tap, weights, rows, known, not layer.fuse_wgrad_accumulation, bias)
