"""The configuration's section about the layout, in Megatron's names. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oblr_megatron.config.section import Section


class ParallelConfig(Section):
    """Layout, in Megatron's names; data parallelism is what is left of the world size."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Stages the layers are cut into."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=2)
    """Model chunks of each pipeline stage (Megatron's interleaved schedule); needs pipeline parallelism."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts layer; taken out of the data-parallel ranks."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks that share each expert; by default tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Split norms and residuals over the sequence inside a tensor-parallel group."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one microbatch; a longer sample goes alone."""
    packing: Literal["rows", "packed"] = "rows"
    """How samples share a microbatch: a row each, padded to the longest; or behind one another without padding."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward instead of kept: none; those of recompute_modules; whole layers."""
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"], ...] = ("core_attn",)
    """What "selective" recomputes: core attention, norms, a dense layer's MLP, a mixture of experts, or between the
    experts' two layers (moe_act; Transformer Engine's alone, as layernorm is on a GPU)."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which layers "full" recomputes: all, in groups of recompute_num_layers; or the first recompute_num_layers."""
    recompute_num_layers: int = Field(1, ge=1)
    """Layers of a group (uniform), or layers recomputed (block)."""
    distributed_timeout_s: float = Field(1800.0, gt=0)
    """Deadline of a collective, seconds."""
    use_distributed_optimizer: bool = False
    """Shard Adam's moments and fp32 masters over data- and context-parallel ranks (Megatron's ZeRO-1); not in fp64."""
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while backward goes on; without norms, with the "momentum" estimator."""
    overlap_param_gather: bool = False
    """Gather the distributed optimizer's weights while the next forward goes on; refused, the push comes first."""
    tp_comm_overlap: bool = False
    """Transformer Engine's overlap of tensor-parallel exchanges with matrix products. Refused: docs/precision.md."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How Transformer Engine's attention exchanges keys and values over context-parallel ranks; ours gathers them."""
    gradient_accumulation_fusion: bool = False
    """Add weight gradients to main_grad inside the matrix product; a GPU with apex or Transformer Engine, no norms."""
    defer_embedding_wgrad_compute: bool = False
    """Make the output layer's weight gradient after the pipeline's flush; with the fusion above, no norms."""
    overlap_moe_expert_parallel_comm: bool = False
    """Overlap the experts' all-to-all with another microbatch's computation; refused, see docs/parallel.md."""
    delay_wgrad_compute: bool = False
    """Make weight gradients later than input gradients; refused with overlap_moe_expert_parallel_comm."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    """Replay layers as CUDA graphs; refused, since microbatches differ in length."""

    @property
    def own_weight_gradients(self) -> bool:
        """Whether megatron-core makes weight gradients in ways of its own, in which no norms can be taken."""
        return self.overlap_grad_reduce or self.gradient_accumulation_fusion or self.defer_embedding_wgrad_compute
