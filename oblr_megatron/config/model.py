"""The configuration's section about the model and how it is held in memory. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section

DtypeName = Literal["float64", "float32", "bfloat16"]


class ModelConfig(Section):
    """The policy: a Qwen3 checkpoint and how it is held in memory."""

    path: Path
    """Hugging Face model directory (config.json, *.safetensors, tokenizer files)."""
    dtype: DtypeName = "float32"
    """Dtype of the trained weights; bfloat16 keeps fp32 master weights in the optimizer. float64 is for tests."""
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size (Megatron's name)."""
    attention: Literal["sdpa", "local"] = "sdpa"
    """Core attention without Transformer Engine: torch's scaled_dot_product_attention, or megatron-core's own."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of megatron-core's own ("local") or of Transformer Engine; "auto": the latter where it and CUDA are, and
    dtype is not float64, which it does not compute in."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """Matrix products in FP8, by Transformer Engine: e4m3 everywhere, or hybrid, with e5m2 for gradients. Weights stay
    in bfloat16; wants dtype "bfloat16"."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """How FP8 scales are found: from earlier steps, from the tensor at hand, from 128-blocks, from blocks of 32."""
    fp8_margin: int = Field(0, ge=0)
    """Delayed scaling: powers of two left free above the largest value seen."""
    fp8_amax_history_len: int = Field(1024, ge=1)
    """Delayed scaling: forward passes whose largest values are remembered."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: which of the remembered values counts."""
    fp8_param: bool = False
    """Hold the weights themselves in FP8 (Megatron's --fp8-param-gather). Refused: docs/precision.md says why."""
    first_last_layers_bf16: bool = False
    """Keep the first and last num_layers_at_start_in_bf16 / num_layers_at_end_in_bf16 layers out of FP8; not under
    delayed scaling."""
    num_layers_at_start_in_bf16: int = Field(1, ge=0)
    """First layers that first_last_layers_bf16 keeps in bf16."""
    num_layers_at_end_in_bf16: int = Field(1, ge=0)
    """Last layers that first_last_layers_bf16 keeps in bf16."""
    moe_router_load_balancing_type: Literal["none", "aux_loss"] = "none"
    """A mixture's balancing loss: none, or Switch Transformer's over each microbatch's response tokens."""
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the auxiliary loss."""
    moe_z_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the routers' z-loss (ST-MoE); 0: none."""

    @property
    def router_losses(self) -> bool:
        """Whether a mixture's routers add a gradient of their own to the policy gradient."""
        return self.moe_aux_loss_coeff > 0 or self.moe_z_loss_coeff > 0
