"""Megatron's options that no run can use, with the reason and what to do instead. Imports no torch."""

from __future__ import annotations

from oblr_megatron.errors import Problem

REFUSED: dict[str, Problem] = {
    "parallel.overlap_param_gather": (
        "the weights go to the engines right after each update, so no forward pass is left to overlap with",
        "leave it out; use_distributed_optimizer gathers the weights without it",
    ),
    "parallel.overlap_moe_expert_parallel_comm": (
        "its schedule interleaves two microbatches, but norms need the backward pass of each one separately",
        "leave it out; expert parallelism works without it",
    ),
    "parallel.delay_wgrad_compute": (
        "it works only with overlap_moe_expert_parallel_comm, which is not supported",
        "leave it out; weight gradients are computed together with input gradients",
    ),
    "parallel.cuda_graph_impl": ("a CUDA graph replays one shape, but microbatches differ in length", "leave it out"),
    "parallel.tp_comm_overlap": (
        "its buffers have one shape for the whole run, but microbatches differ in length",
        "leave it out",
    ),
    "model.fp8_param": (
        "checkpoints, fp32 masters and weight pushes all need the weights in bfloat16",
        "leave it out; matrix products use FP8 with model.fp8 alone",
    ),
    "model.fp8_recipe=delayed": (
        "its scales come from earlier passes, and a step has passes of several kinds",
        'write "tensorwise", "blockwise" or "mxfp8"',
    ),
    "model.fp8_margin": ("only delayed scaling reads it, which is not supported", "leave it out"),
    "model.fp8_amax_history_len": ("only delayed scaling reads it, which is not supported", "leave it out"),
    "model.fp8_amax_compute_algo": ("only delayed scaling reads it, which is not supported", "leave it out"),
    "model.first_last_layers_bf16": (
        "the numbers of layers say it",
        "set model.num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16",
    ),
    "parallel.cp_comm_type": ("Transformer Engine exchanges keys and values in a ring", "leave it out"),
    "parallel.gradient_accumulation_fusion": (
        "it adds products to main_grad inside a kernel, so no norm could be measured",
        "leave it out",
    ),
    "parallel.defer_embedding_wgrad_compute": (
        "it needs gradient_accumulation_fusion, which is not supported",
        "leave it out",
    ),
    "model.moe_router_load_balancing_type": ("moe_aux_loss_coeff says it", "set model.moe_aux_loss_coeff, 0 for none"),
}
"""Key, or key=value -> (reason, what to do instead)."""
