"""Section [model]: checkpoint, dtype, FP8, router losses. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from oblr_megatron.config.lora import LoraConfig
from oblr_megatron.config.section import Section
from oblr_megatron.types import HeadDtype


class ModelConfig(Section):
    """The policy: a checkpoint and its precision."""

    path: Path
    """Hugging Face model directory (config.json, *.safetensors, tokenizer files)."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Dtype of the trained weights. With bfloat16 the optimizer keeps fp32 master weights. float64 is for tests."""
    head_dtype: HeadDtype = "auto"
    """Dtype of the logits in trainer and engines, if dtype is bfloat16. "model": bfloat16. "auto": float32 on GPUs,
    where it is nearly free; "model" on CPUs."""
    make_vocab_size_divisible_by: int = Field(128, ge=1, le=2**20)
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of megatron-core ("local") or of Transformer Engine. "auto": Transformer Engine if it and CUDA are there
    and dtype is bfloat16."""
    batch_invariant: bool = False
    """Trainer and engine compute the same log-probs to the bit, in every batch; a difference ends the run. For dense
    models on CPUs; slow (docs/zero_mismatch.md)."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 matrix products by Transformer Engine: e4m3 everywhere, or e5m2 for gradients ("hybrid"). Needs dtype
    "bfloat16"."""
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """FP8 scales: from each tensor, from blocks of 128 or from blocks of 32 (docs/precision.md)."""
    num_layers_at_start_in_bf16: int = Field(0, ge=0)
    """First layers that FP8 leaves in bf16."""
    num_layers_at_end_in_bf16: int = Field(0, ge=0)
    """Last layers that FP8 leaves in bf16."""
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    """Weight of Switch Transformer's load-balancing loss over each microbatch's response tokens, for a mixture of
    experts. 0: none."""
    moe_z_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the router z-loss (ST-MoE). 0: none."""
    moe_routing_replay: bool = False
    """Train each token through the experts that the engine chose for it when it was sampled (R3, arXiv 2510.11370;
    docs/moe.md). For mixtures of experts."""
    lora: LoraConfig = LoraConfig()

    @property
    def keeps_layers_in_bf16(self) -> bool:
        """Whether FP8 leaves out some layers."""
        return self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16 > 0

    @property
    def router_losses(self) -> bool:
        """Whether a router loss adds to the policy gradient."""
        return self.moe_aux_loss_coeff > 0 or self.moe_z_loss_coeff > 0
