"""Taps on a model that somebody else has built, for as long as a `with` block lasts.

    with tapped(model) as handle:            # a GPTModel, a wrapped one, or the list of a rank's chunks
        per_sample_sq_grad_norms(handle, microbatches, loss)

During a call megatron-core's schedule divides no loss and starts no reduction over replicas. Between calls a model
inside DistributedDataParallel trains as without taps; another trains after the block. At its end everything is as
before. What the passes cannot measure is refused, with the field to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from oblr_megatron.errors import UserError
from oblr_megatron.model import moe
from oblr_megatron.model.lora.linear import ReplicatedLinear
from oblr_megatron.model.parallel import Parallel, from_megatron
from oblr_megatron.model.tapped import TappedModel, unwrapped
from oblr_megatron.model.taps import Tap, install
from oblr_megatron.model.te_taps import install_te
from oblr_megatron.norms.own_gradients import OwnGradients
from oblr_megatron.norms.rules import classify
from oblr_megatron.padding import FP8_TOKENS, Padding

SCHEDULE: Mapping[str, Any] = {
    "calculate_per_token_loss": True,  # the loss is not divided
    "variable_seq_lengths": True,  # pipeline stages exchange shapes
    "no_sync_func": None,
    "grad_sync_func": None,
    "finalize_model_grads_func": None,
    "grad_scale_func": None,
    "num_microbatches_with_partial_activation_checkpoints": None,  # the schedule would give the step another argument
}
"""Fields of megatron-core's configuration during a call."""

TAPPED = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, VocabParallelEmbedding)

DROPOUT = ("hidden_dropout", "attention_dropout")

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "a pass has no loss scale, so that small gradients become 0"),
    "moe_aux_loss_coeff": ((0, None), "router losses mix samples"),
    "moe_z_loss_coeff": ((0, None), "router losses mix samples"),
    "moe_router_load_balancing_type": (
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        "its routing depends on other samples",
    ),
    "moe_input_jitter_eps": ((None,), "two passes would draw different noise"),
    "moe_router_force_load_balancing": ((False,), "two passes would draw different routes"),
    "moe_router_force_biased": ((None,), "two passes would draw different routes"),
    "moe_router_enable_expert_bias": ((False,), "a pass for norms would count its tokens again"),
    "moe_expert_capacity_factor": ((None,), "dropped tokens depend on other samples"),
    "moe_shared_expert_intermediate_size": ((None,), "shared experts are untested"),
    "multi_latent_attention": ((False,), "the norms of its latents are untested"),
    "experimental_attention_variant": ((None,), "the norms of its layers are untested"),
    "mtp_num_layers": ((None, 0), "multi-token prediction adds a loss of its own"),
    "defer_embedding_wgrad_compute": ((False,), "the output layer's gradient would come after backward"),
    "delay_wgrad_compute": ((False,), "weight gradients would come after backward"),
    "overlap_moe_expert_parallel_comm": ((False,), "backwards of microbatches would overlap"),
    "enable_cuda_graph": ((False,), "a graph replays kernels, not taps"),
    "external_cuda_graph": ((False,), "a graph replays kernels, not taps"),
    "cuda_graph_impl": (("none", None), "a graph replays kernels, not taps"),
    "cpu_offloading": ((False,), "offloaded activations are untested"),
    "mlp_chunks_for_training": ((1,), "each chunk's share of a gradient would be squared on its own"),
    "enable_autocast": ((False,), "a layer's input and output would have two dtypes"),
    "fp4": ((None,), "its gradients are untested"),
    "quant_recipe": ((None,), "its gradients are untested"),
    "use_transformer_engine_op_fuser": ((False,), "fused layers never call the modules that are tapped"),
    "overlap_dispatch_backward_with_experts_wgrad": ((False,), "experts' gradients would bypass autograd"),
    "gtp_weight_remat_size": ((1,), "weights in further pieces are untested"),
    "expert_gtp_weight_remat_size": ((1,), "weights in further pieces are untested"),
}
"""Field of TransformerConfig -> accepted values, and the reason."""


@contextmanager
def tapped(model: nn.Module | Sequence[nn.Module]) -> Iterator[TappedModel]:
    """Tap this rank's part of a model. Collective: every rank of the world enters it.

    Args:
        model: a GPTModel, alone or inside DistributedDataParallel and Float16Module; for the interleaved schedule the
            list of this rank's chunks.

    Yields:
        A handle for the functions of `norms/api.py`.

    Raises:
        UserError: megatron-core's groups do not exist, or the model has something that the passes cannot measure.
    """
    given = list(model) if isinstance(model, Sequence) else [model]
    for chunk in given:
        _check(chunk)
    config = unwrapped(given[0]).config
    parallel = from_megatron(vp_size=len(given), sequence_parallel=config.sequence_parallel)
    tap = Tap()
    padding = Padding.of(
        tp_size=parallel.tp_size,
        cp_size=parallel.cp_size,
        sequence_parallel=parallel.sequence_parallel,
        recipe=config.fp8_recipe if config.fp8 else None,
    )
    chunks: list[Any] = [part if isinstance(part, DistributedDataParallel) else OwnGradients(part) for part in given]
    try:
        for chunk in given:
            _check_experts(chunk, parallel)
            splits = moe.splits_of(chunk, parallel, tap)
            install(chunk, tap, splits)
            install_te(chunk, tap, config, splits)
        handle = TappedModel(chunks, config, parallel, tap, padding)
        classify(handle)  # refuses what no rule covers
        yield handle
    finally:
        tap.remove()
        _close(parallel)


def _check(chunk: nn.Module) -> None:
    """Refuse what the passes cannot measure, with the module or field and the fix."""
    wrapper = chunk
    while hasattr(wrapper, "module"):
        if not isinstance(wrapper, (DistributedDataParallel, Float16Module)):
            fix = "wrap it in megatron-core's DistributedDataParallel, or in nothing"
            raise UserError(f"the model is wrapped in a {type(wrapper).__name__}", where="model", fix=fix)
        wrapper = wrapper.module
    module = unwrapped(chunk)
    wrapped = isinstance(chunk, DistributedDataParallel)
    if not wrapped and any(hasattr(parameter, "main_grad") for parameter in module.parameters()):
        raise UserError(
            "the parameters have a main_grad, which belongs to a wrapper that was not given",
            where="model",
            fix="pass the DistributedDataParallel itself, not what is inside",
        )
    if fused := next((one for one in module.modules() if _is_fused(type(one))), None):
        fix = "build the layers without use_te_op_fuser"
        raise UserError(f"{type(fused).__name__} never calls the modules that are tapped", where="model", fix=fix)
    if not isinstance(module, GPTModel):
        raise UserError(
            f"the model is a {type(module).__name__}, not megatron-core's GPTModel",
            where="model",
            fix="pass the GPTModel, or the list of this rank's chunks",
        )
    places = [part for _, part in module.named_modules(remove_duplicate=False)]  # a module may have two
    holders = Counter(id(parameter) for part in places for parameter in part.parameters(recurse=False))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and holders[id(parameter)] > 1:
            fix = "give each its own, or tie embeddings by share_embeddings_and_output_weights"
            raise UserError(f"the model uses the parameter {name} in two places", where="model", fix=fix)
    if module.position_embedding_type == "learned_absolute":
        what = "position_embedding_type is 'learned_absolute', which has weights without a rule"
        raise UserError(what, where="GPTModel", fix="use 'rope'")
    options = getattr(chunk, "ddp_config", None)
    if getattr(options, "overlap_grad_reduce", False) or getattr(options, "use_megatron_fsdp", False):
        raise UserError(
            "the data-parallel wrapper reduces gradients during backward",
            where="DistributedDataParallelConfig",
            fix="set overlap_grad_reduce and use_megatron_fsdp to false",
        )
    if getattr(options, "param_name_patterns_for_fp32_local_accumulation", ()):
        raise UserError(
            "the data-parallel wrapper keeps main_grad outside of its buffers",
            where="DistributedDataParallelConfig",
            fix="set grad_reduce_in_fp32 instead of param_name_patterns_for_fp32_local_accumulation",
        )
    if getattr(options, "reuse_grad_buf_for_mxfp8_param_ag", False) and getattr(options, "overlap_param_gather", False):
        raise UserError(
            "main_grad holds the next weights until the first forward",
            where="DistributedDataParallelConfig",
            fix="set overlap_param_gather to false",
        )
    _check_config(module.config, training=module.training)
    _check_modules(module)


def _check_modules(module: nn.Module) -> None:
    """Refuse dropout in training mode, routers that mix samples, and tapped layers with a forward of their own.

    Layers keep the rates that the configuration had when they were built.
    """
    routing, _ = REFUSED["moe_router_load_balancing_type"]
    for name, part in module.named_modules():
        kept = [getattr(part, field, 0.0) for field in DROPOUT]  # Transformer Engine has a module under such a name
        drops = (isinstance(part, _DropoutNd) and part.p > 0) or any(isinstance(p, float) and p > 0 for p in kept)
        if part.training and drops:
            what = f"{name} drops values: passes would draw different masks"
            raise UserError(what, where="model", fix="build the model without dropout, or call model.eval()")
        if (kind := getattr(part, "routing_type", routing[0])) not in routing:
            what = f"{name} was built for {kind!r}: its routing depends on other samples"
            raise UserError(what, where="model", fix=f"build the model with {routing[0]!r}")
        own = type(part).forward.__module__.partition(".")[0] in ("megatron", "oblr_megatron")
        if isinstance(part, TAPPED) and not own:
            what = f"{name} is a {type(part).__name__} with a forward of its own, which a tap may replace or miss"
            raise UserError(what, where="model", fix="use megatron-core's class itself")


def _is_fused(kind: type) -> bool:
    """Whether a class is Transformer Engine's fused MLP, by name: megatron-core 0.16 has none."""
    return any(base.__name__ == "TEFusedMLP" for base in kind.__mro__)


def _check_experts(chunk: nn.Module, parallel: Parallel) -> None:
    """Refuse copies of experts without the mark that megatron-core 0.16 sets only under expert parallelism."""
    copies = isinstance(chunk, DistributedDataParallel) and parallel.etp_size < parallel.tp_size
    if copies and not all(moe.is_expert(parameter) for parameter in moe.experts_of(chunk)):
        raise UserError(
            "the wrapper never sums the experts' gradients over the tensor-parallel ranks that hold copies",
            where="DistributedDataParallel",
            fix="call oblr_megatron.model.moe.mark_experts(model) before you wrap it",
        )


def _check_config(config: TransformerConfig, *, training: bool) -> None:
    values = {name: getattr(config, name, accepted[0]) for name, (accepted, _) in REFUSED.items()}
    wrong = {name: why for name, (accepted, why) in REFUSED.items() if values[name] not in accepted}
    wrong |= {name: "passes would draw different masks" for name in DROPOUT if training and getattr(config, name)}
    if config.num_moe_experts and config.moe_token_dispatcher_type != "alltoall":
        raise UserError(
            f"moe_token_dispatcher_type is {config.moe_token_dispatcher_type!r}: it hides the order of experts' tokens",
            where="TransformerConfig",
            fix="set it to 'alltoall'",
        )
    if config.fp8 and config.fp8_recipe not in FP8_TOKENS:
        fix = f"use one of {', '.join(FP8_TOKENS)}"
        raise UserError(f"fp8_recipe is {config.fp8_recipe!r}, which is untested", where="TransformerConfig", fix=fix)
    for name, why in wrong.items():
        accepted = REFUSED[name][0][0] if name in REFUSED else 0.0
        raise UserError(
            f"{name} is {getattr(config, name)!r}: {why}",
            where="TransformerConfig",
            fix=f"set it to {accepted!r} before you build the model",
        )


@contextmanager
def scheduled(model: TappedModel) -> Iterator[None]:
    """Set `SCHEDULE` in every configuration that megatron-core's schedule may read: of wrappers and of the models."""
    unique: dict[int, TransformerConfig] = {}
    for part in model.chunks:
        layer: Any = part
        while layer is not None:
            if isinstance(config := getattr(layer, "config", None), TransformerConfig):
                unique[id(config)] = config
            layer = getattr(layer, "module", None)
    before = [(config, {name: getattr(config, name) for name in SCHEDULE}) for config in unique.values()]
    try:
        for config, _ in before:
            for name, value in SCHEDULE.items():
                setattr(config, name, value)
        yield
    finally:
        for config, values in before:
            for name, value in values.items():
                setattr(config, name, value)


def _close(parallel: Parallel) -> None:
    """Destroy the groups that `from_megatron` created in addition to megatron-core's."""
    own = dict.fromkeys((parallel.replica_group, parallel.block_group, parallel.expert_sum_group))
    for group in own:  # in one order on all ranks: the end of a communicator is collective
        if group not in (None, parallel.model_group):
            dist.destroy_process_group(group)
