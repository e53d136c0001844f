"""Keys and values that no run can use, with the reason and what to do instead. Imports no torch."""

from __future__ import annotations

from oblr_megatron.errors import Problem

MOVED = (
    "eob",
    "james_stein",
    "length_loo",
    "median_loo",
    "optimal_prior",
    "reinforce_pp_baseline",
    "rloo_prior",
)
"""Baselines that studies/baselines.py has."""

REMOVED: dict[str, Problem] = {
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
    "gradnorm.source=sketch": ('it gained nothing over "logit"', 'write "exact" or "logit"'),
    "gradnorm.sketch_size": ("random projections are gone", "leave it out"),
    "gradnorm.stash_spread": (
        "the responses of a prompt stay on one replica",
        'leave it out, or set gradnorm.mode to "bookkeep" or "two_pass" if the gradients do not fit',
    ),
    "gradnorm.stash_lag": ("it belonged to gradnorm.stash_spread, which is gone", "leave it out"),
    "gradnorm.stash_offload": (
        "stashed gradients stay on the device",
        'leave it out, or set gradnorm.mode to "bookkeep" or "two_pass" if the gradients do not fit',
    ),
    "gradnorm.stash_dtype": ("stashed gradients have the dtype of the gradient", "leave it out"),
    "algo.baseline=otb": (
        "token-wise baselines needed a forward pass of their own and lost to pooled",
        'set algo.baseline = "pooled"; otb is an arm of the toy studies (studies/rivals.py)',
    ),
    "algo.baseline=pooled_token": ("it needed as many samples as pooled", 'set algo.baseline = "pooled"'),
    **{
        f"algo.baseline={name}": (
            "it is no longer in the package, but a function of the studies",
            f'set algo.baseline = "studies.baselines:{name}" in a clone of the repository',
        )
        for name in MOVED
    },
    **{
        f"algo.preset={name}": (
            "its baseline is no longer in the package, but a function of the studies",
            f'set algo.baseline = "studies.baselines:{name}" in a clone of the repository',
        )
        for name in ("james_stein", "eob", "reinforce_pp_baseline")
    },
    "algo.prior_strength": ("no baseline of the package has a prior", "leave it out; see studies/baselines.py"),
    "algo.length_exponent": ("no baseline of the package has it", "leave it out; see studies/baselines.py"),
    **{
        f"algo.schedule={name}": (
            "controls that reuse another run's rates are a matter of the toy studies",
            'leave it out, or set control = "shuffled" or "matched_decay" for an arm of a study',
        )
        for name in ("shuffled", "matched_decay")
    },
    "algo.schedule_from": ("no schedule takes the rates of another run", "leave it out"),
    "algo.preset=otb": (
        "token-wise baselines needed a forward pass of their own and lost to pooled",
        'set algo.preset = "oblr_pooled"; otb is an arm of the toy studies (studies/rivals.py)',
    ),
    "model.fp8_recipe=delayed": (
        "its scales come from earlier passes, and a step has passes of several kinds",
        'write "tensorwise", "blockwise" or "mxfp8"',
    ),
    "model.fp8_margin": ("it belonged to delayed scaling, which is gone", "leave it out"),
    "model.fp8_amax_history_len": ("it belonged to delayed scaling, which is gone", "leave it out"),
    "model.fp8_amax_compute_algo": ("it belonged to delayed scaling, which is gone", "leave it out"),
    "model.first_last_layers_bf16": (
        "the numbers of layers say it",
        "set model.num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16",
    ),
    "parallel.cp_comm_type": ("Transformer Engine exchanges keys and values in a ring", "leave it out"),
    "parallel.gradient_accumulation_fusion": (
        "it adds products to main_grad inside a kernel, so no norm could be measured",
        "leave it out",
    ),
    "parallel.defer_embedding_wgrad_compute": ("it needs gradient_accumulation_fusion, which is gone", "leave it out"),
    "model.attention": ("the layers have torch's scaled_dot_product_attention", "leave it out"),
    "model.moe_router_load_balancing_type": ("moe_aux_loss_coeff says it", "set model.moe_aux_loss_coeff, 0 for none"),
    "data.overlap_ngram": ("overlaps are runs of 10 words", "leave it out"),
    "rollout.sleep_timeout_s": ("an engine has 120 s to free or reclaim its memory", "leave it out"),
    "rollout.dynamic_sampling_max_batches": ("a step samples at most 4 batches for mixed groups", "leave it out"),
    "weights.bucket_mib": ("a bucket has 8 MiB, or the size of the largest tensor by CUDA IPC", "leave it out"),
    "weights.piece_mib": ("a piece has 512 MiB, or the size of the largest parameter", "leave it out"),
    "weights.checksum": ("every bucket has a checksum", "leave it out"),
    "checkpoint.save_timeout_s": ("a save has the deadline of a collective", "set parallel.distributed_timeout_s"),
    "evaluate.save": ("responses of evaluations are always written", "leave it out"),
    "gradnorm.check_samples": ("the check takes 16 responses", "leave it out"),
    "algo.snr.momentum_horizon": ("the estimator averages gradients over 10 steps", "leave it out"),
    "reward.retries": ("a failed request is sent again at most 3 times, within reward.timeout_s", "leave it out"),
    "rollout.environment.blocked_s": (
        "a function may run for 10 s without an await, or for deadline_s if that is less",
        "leave it out",
    ),
    "log.tracker_timeout_s": ("trackers have 120 s at the end of a run", "leave it out"),
    "rollout.api_key_env": ("the key of the servers is in OBLR_API_KEY", "export OBLR_API_KEY=KEY"),
    "log.peak_tflops": ("the peak is that of the device in observe/performance/hardware.py", "leave it out"),
    "log.profile_ranks": ("the first rank is profiled", "leave it out"),
    "log.console": ("the console has one line per step", "leave it out"),
}
"""Key, or key=value -> (reason, what to do instead): Megatron's options, and keys and values that are gone."""
