"""Section [parallel]: the layout, with Megatron's names. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import LONGEST_WAIT_S, Section


class ParallelConfig(Section):
    """Layout, with Megatron's names. The remaining factor of the world size is data parallelism."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)
    """Model chunks per pipeline stage (interleaved schedule)."""
    account_for_embedding_and_loss: bool = False
    """Divide layers + 2 over the stages: the first and the last one hold one layer less. It sets Megatron's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of a layer, out of the tensor-, context- and data-parallel ranks."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks that share each expert; by default tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Split norms and residuals over the sequence within a tensor-parallel group."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens per microbatch; a longer sample goes alone."""
    packing: Literal["rows", "packed"] = "rows"
    """Layout of samples in a microbatch: "rows", one row each, padded to the longest; "packed", concatenated."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward: none; those of recompute_modules; whole layers."""
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"], ...] = ("core_attn",)
    """Parts that "selective" recomputes: core attention, norms, the MLP of a dense layer, the experts, or the
    activation within experts. moe_act needs Transformer Engine. On a GPU layernorm needs a mixture or LoRA."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Layers that "full" recomputes: all, in groups of recompute_num_layers; or the first recompute_num_layers."""
    recompute_num_layers: int = Field(1, ge=1)
    """Layers per group ("uniform") or number of recomputed layers ("block")."""
    distributed_timeout_s: float = Field(1800.0, gt=0, le=LONGEST_WAIT_S)
    """Deadline of a collective and of writing a checkpoint, seconds."""
    use_distributed_optimizer: bool = False
    """Shard Adam's moments and fp32 masters over data- and context-parallel ranks (ZeRO-1). Not in float64."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks during backward. Needs a run without norms and algo.snr.estimator
    "momentum"."""

    def layers_of_stage(self, layers: int, stage: int) -> int:
        """Layers of a pipeline stage, all its chunks together.

        Example, 94 layers on 8 stages with account_for_embedding_and_loss: 11, 12, 12, 12, 12, 12, 12, 11.
        """
        stages, ends = self.pipeline_model_parallel_size, int(self.account_for_embedding_and_loss)
        return (layers + 2 * ends) // stages - ends * ((stage == 0) + (stage == stages - 1))
