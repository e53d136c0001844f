"""Whether a model fits a layout: heads, layers, ranks, supported features; and a free port. Imports no torch.

`check_layout` runs before any process starts, on the model's config.json.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import Problem, UserError
from oblr_megatron.families import LLAMA3_ROPE, OF_MLP, family_of

if TYPE_CHECKING:
    from oblr_megatron.config import Config, ParallelConfig

MOST_RANKS = 100_000
ROPES = ("rope_parameters", "rope_scaling")
"""Tables of config.json with the kind of rotary embedding."""
PARTIAL_ROTATION = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
"""Names under which vLLM reads which part of a head is rotated."""


def check_layout(hf_config: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Refuse a layout that does not divide the model or the number of ranks.

    Raises:
        UserError: names both numbers and the fix.
    """
    from oblr_megatron.config.precision_checks import check_sizes  # the norms' library loads no configuration

    check_world_size(config.parallel, world_size)
    check_model(hf_config, config.parallel, where=str(config.model.path))
    check_router_keys(hf_config, config)
    check_recompute(hf_config, config.parallel)
    check_sizes(hf_config, config)
    check_adapters(hf_config, config)


def check_adapters(hf_config: Mapping[str, Any], config: Config) -> None:
    """Refuse adapters (model.lora) that this model or layout cannot have."""
    lora, where = config.model.lora, "config: model.lora.targets"
    if not lora.rank:
        return
    tp = config.parallel.tensor_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size or tp
    if num_experts(hf_config) and etp > 1 and set(lora.targets) & set(OF_MLP):
        what = f"adapters of experts that {etp} tensor-parallel ranks share are not supported"
        fix = "set parallel.expert_tensor_parallel_size to 1"
        raise UserError(what, where=where, fix=fix)
    if num_experts(hf_config) and set(lora.targets) <= set(OF_MLP):
        what = "adapters of experts alone are not supported"
        raise UserError(what, where=where, fix='add a matrix of the attention, e.g. "o_proj"')
    if num_experts(hf_config) and config.rollout.lora == "adapter":
        what, fix = "engines take no adapters of a mixture", 'set rollout.lora to "merged"'
        raise UserError(what, where="config: rollout.lora", fix=fix)
    groups = hf_config["num_key_value_heads"]
    if groups % tp and set(lora.targets) & {"q_proj", "k_proj", "v_proj"}:
        what = f"adapters of q, k and v: {groups} groups of heads cannot be shared whole by {tp} ranks"
        fix = f"set parallel.tensor_model_parallel_size to a divisor of {groups}, or leave these three out"
        raise UserError(what, where=where, fix=fix)


def check_recompute(hf_config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Refuse to recompute a module that the model does not have; megatron-core would silently ignore it."""
    experts = num_experts(hf_config)
    absent = ("mlp",) if experts else ("moe", "moe_act")
    unknown = [name for name in parallel.recompute_modules if name in absent]
    if parallel.recompute_granularity == "selective" and unknown:
        raise UserError(
            f"parallel.recompute_modules {unknown[0]!r} in a model {'with' if experts else 'without'} experts",
            where="config: parallel.recompute_modules",
            fix=f'use "{"moe" if experts else "mlp"}" instead',
        )


def check_router_keys(hf_config: Mapping[str, Any], config: Config) -> None:
    """Refuse router losses and routing replay for a dense model."""
    keys = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_routing_replay")
    given = [key for key in keys if getattr(config.model, key)]
    if given and not num_experts(hf_config):
        raise UserError(
            f"{given[0]} is set, but the model has no experts",
            where="config: model",
            fix="leave it out, or train a mixture of experts",
        )


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of ranks that is not a multiple of a replica's ranks or of the experts' ranks, or absurd."""
    if world_size > MOST_RANKS:
        fix = "correct --nnodes and --nproc-per-node"
        raise UserError(f"{world_size} ranks are more than {MOST_RANKS}", where="command line", fix=fix)
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    replica = tp * pp * cp
    if world_size % replica:
        factors = f"tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp}"
        factors += f" x context_parallel_size {cp}" if cp > 1 else ""
        raise UserError(
            f"{world_size} rank{'s' if world_size > 1 else ''} cannot be divided into model replicas of "
            f"{factors} = {replica} ranks",
            where="config: parallel",
            fix=f"start a multiple of {replica} ranks (--nproc-per-node), or lower one of the sizes",
        )
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    if world_size % (ep * etp * pp):
        raise UserError(
            f"{world_size} ranks cannot be divided into expert_model_parallel_size {ep} x expert_tensor_parallel_size "
            f"{etp} x pipeline_model_parallel_size {pp} = {ep * etp * pp}",
            where="config: parallel",
            fix="lower parallel.expert_model_parallel_size or expert_tensor_parallel_size",
        )


def check_port(port: int) -> None:
    """Refuse a rendezvous port (MASTER_PORT) that rank 0 cannot listen on.

    Raises:
        UserError: the port is taken or invalid.
    """
    try:
        with socket.create_server(("", port)):
            return
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on port {port}: {reason}",
            where="MASTER_PORT",
            fix="choose a free port, or leave it out so that the launcher chooses one",
        ) from error


def check_model(hf_config: Mapping[str, Any], parallel: ParallelConfig, where: str) -> None:
    """Refuse a model that the layout does not divide, or that has an unsupported feature."""
    for what, fix in _feature_problems(hf_config, where):
        raise UserError(what, where=where, fix=fix)
    tp = parallel.tensor_model_parallel_size
    heads, groups = _count(hf_config, "num_attention_heads", where), _count(hf_config, "num_key_value_heads", where)
    _check_divides(heads, groups, "num_attention_heads", "num_key_value_heads", where)
    if problem := heads_problem(hf_config, tp, "tensor_model_parallel_size"):
        raise UserError(problem[0], where=where, fix=problem[1])
    _check_mlp(hf_config, parallel, where)
    _check_stages(_count(hf_config, "num_hidden_layers", where), parallel, where)


def heads_problem(hf_config: Mapping[str, Any], width: int, option: str) -> Problem | None:
    """Why `width` devices, the value of `option`, cannot divide the attention heads of a model; None if they can."""
    heads, groups = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    if heads % width:
        return f"num_attention_heads {heads} is not a multiple of {option} {width}", f"choose a divisor of {heads}"
    if groups % width and width % groups:  # more devices than key heads: each holds a copy of one
        what = f"num_key_value_heads {groups} and {option} {width} do not divide one another"
        return what, f"choose a divisor or a multiple of {groups}"
    return None


def _check_stages(layers: int, parallel: ParallelConfig, where: str) -> None:
    """Layers divide into pipeline stages, chunks and recomputed groups."""
    pp, vp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    ends = parallel.account_for_embedding_and_loss
    if pp == 1 and (vp is not None or ends):
        option = "account_for_embedding_and_loss" if vp is None else f"virtual_pipeline_model_parallel_size {vp}"
        raise UserError(
            f"{option} without pipeline parallelism",
            where="config: parallel",
            fix="leave it out, or set parallel.pipeline_model_parallel_size to 2 or more",
        )
    name, divided = ("num_hidden_layers + 2 =", layers + 2) if ends else ("num_hidden_layers", layers)
    _check_divides(divided, pp, name, "pipeline_model_parallel_size", where)
    chunks = pp * (vp or 1)
    if divided % chunks:
        raise UserError(
            f"{name} {divided} is not a multiple of pipeline_model_parallel_size {pp} x "
            f"virtual_pipeline_model_parallel_size {vp} = {chunks}",
            where=where,
            fix=f"choose sizes so that their product divides {divided}",
        )
    chunk, group = divided // chunks, parallel.recompute_num_layers
    if ends and chunk == 1:
        raise UserError(
            "account_for_embedding_and_loss leaves no layer for the first and last model chunk",
            where="config: parallel",
            fix="lower parallel.pipeline_model_parallel_size or virtual_pipeline_model_parallel_size",
        )
    grouped = parallel.recompute_granularity == "full" and parallel.recompute_method == "uniform"
    uneven = [size for size in (chunk, chunk - ends) if size % group]
    if grouped and uneven:
        raise UserError(
            f"the {uneven[0]} layers of a model chunk do not divide into groups of recompute_num_layers {group}",
            where="config: parallel.recompute_num_layers",
            fix="set it to 1" if ends else f"choose a divisor of {chunk}",
        )


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """Experts per layer, 0 in a dense model. Reads the key of published checkpoints or the one of transformers."""
    return hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0


def _check_mlp(hf_config: Mapping[str, Any], parallel: ParallelConfig, where: str) -> None:
    """The MLP or the experts of a layer."""
    if num_experts(hf_config):
        _check_mixture(hf_config, where)
        _check_experts_divide(hf_config, parallel, where)
        return
    tp, ep, etp = (
        parallel.tensor_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    if ep > 1 or etp not in (None, tp):
        raise UserError(
            f"expert_model_parallel_size {ep}, expert_tensor_parallel_size {etp} for a model without experts",
            where="config: parallel",
            fix="leave both out, or train a mixture of experts",
        )
    ffn = _count(hf_config, "intermediate_size", where)
    _check_divides(ffn, tp, "intermediate_size", "tensor_model_parallel_size", where)


def _check_mixture(hf_config: Mapping[str, Any], where: str) -> None:
    """Every layer has experts, and enough of them."""
    if hf_config.get("mlp_only_layers") or hf_config.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            "mixing dense layers and layers with experts is not supported",
            where=where,
            fix="use a model with mlp_only_layers [] and decoder_sparse_step 1 in its config.json",
        )
    if _count(hf_config, "num_experts_per_tok", where) > num_experts(hf_config):
        raise UserError(
            f"num_experts_per_tok {hf_config['num_experts_per_tok']} is more than the {num_experts(hf_config)} experts",
            where=where,
            fix="use the config.json that came with the weights",
        )


def _check_experts_divide(hf_config: Mapping[str, Any], parallel: ParallelConfig, where: str) -> None:
    """Experts divide over expert-parallel ranks, and these over the ranks that share a sample, or the other way round.

    Otherwise the gradient of an expert would sum over a fraction of a replica.
    """
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"experts with tensor_model_parallel_size {tp} but without sequence_parallel: every token would reach its "
            f"experts {tp} times",
            where="config: parallel",
            fix="set parallel.sequence_parallel to true",
        )
    etp, sharing = parallel.expert_tensor_parallel_size or tp, tp * parallel.context_parallel_size
    _check_divides(num_experts(hf_config), ep, "num_experts", "expert_model_parallel_size", where)
    ffn = _count(hf_config, "moe_intermediate_size", where)
    _check_divides(ffn, etp, "moe_intermediate_size", "expert_tensor_parallel_size", where)
    if ep * etp % sharing and sharing % (ep * etp):
        raise UserError(
            f"expert_model_parallel_size {ep} x expert_tensor_parallel_size {etp} = {ep * etp} and the {sharing} ranks "
            "that share a sample (tensor x context parallel) do not divide one another",
            where="config: parallel",
            fix="make one a multiple of the other",
        )


def _feature_problems(hf_config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Features that the trainer does not have, or that vLLM computes in another way."""
    family = family_of(hf_config, where)
    for key in ROPES:  # transformers reads the second where both are there
        rope = hf_config.get(key) or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in family.rope_types:
            yield (
                f"{key} with rope_type {rope_type!r} is not supported for {family.name}",
                'set rope_type to "default" in config.json, and stay within the positions the model was trained on',
            )
        other = {name: rope.get(name) for name, value in LLAMA3_ROPE.items() if rope.get(name) != value}
        if rope_type == "llama3" and other:
            yield (
                f"{key} with {', '.join(f'{name} {value!r}' for name, value in other.items())}: megatron-core computes "
                f"with {', '.join(f'{name} {value}' for name, value in LLAMA3_ROPE.items())}",
                "use a model with these values, such as Llama 3.1, 3.2 or 3.3",
            )
    for table in (hf_config, *(hf_config.get(key) or {} for key in ROPES)):
        for name in PARTIAL_ROTATION:
            if table.get(name) not in (None, 1):
                reason = "vLLM would rotate a part of a head, the trainer rotates all of it"
                yield f"{name} {table[name]!r} is not supported: {reason}", "use a model without it"
    stated, heads = hf_config.get("head_dim"), hf_config.get("num_attention_heads")
    if stated and family.states_head_dim is False and stated * (heads or 0) != hf_config.get("hidden_size"):
        what = f"head_dim {stated} is not hidden_size {hf_config.get('hidden_size')} / num_attention_heads {heads}"
        yield what, f"leave head_dim out: vLLM computes it for {family.name}"
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf_config.get(key):
            yield f"{key} = true is not supported", "use a model without it"
    if hf_config.get("dual_chunk_attention_config"):
        fix = "remove it from config.json, and stay within its original_max_position_embeddings"
        yield "dual_chunk_attention_config is not supported: vLLM's attention does not take it", fix
    if hf_config.get("sliding_window") and family.model_type == "llama":  # the others have use_sliding_window
        what = f"sliding_window {hf_config['sliding_window']!r} is not supported: vLLM would apply it, the trainer not"
        yield what, "remove sliding_window from config.json, and stay within its length"
    if hf_config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {hf_config['hidden_act']!r} is not supported", "use a model with silu"


def _count(hf_config: Mapping[str, Any], key: str, where: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key} = {value!r} in config.json", where=where, fix="use a complete config.json")
    return value


def _check_divides(value: int, divisor: int, name: str, divisor_name: str, where: str) -> None:
    if value % divisor:
        raise UserError(
            f"{name} {value} is not a multiple of {divisor_name} {divisor}",
            where=where,
            fix=f"choose a {divisor_name} that divides {value}",
        )
