"""Whether a model fits a layout (heads, layers, ranks, supported features), and the ranks can meet. Imports no torch.

`check_layout` is called before any process is started, with the model's config.json as a dict.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from oblr_megatron.config import Config, ParallelConfig
from oblr_megatron.errors import UserError


def check_layout(hf_config: Mapping[str, Any], config: Config, world_size: int) -> None:
    """Refuse a layout that the model or the number of ranks does not divide into.

    Args:
        hf_config: the model's config.json.
        config: the run.
        world_size: ranks the run will have.

    Raises:
        UserError: naming both numbers and what to change.
    """
    check_world_size(config.parallel, world_size)
    check_model(hf_config, config.parallel, where=str(config.model.path))


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of ranks that is not a multiple of a replica's, or that the experts do not divide into."""
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
            mend=f"start a multiple of {replica} ranks (torchrun --nproc-per-node), or lower one of the sizes",
        )
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    if world_size % (ep * etp * pp):
        raise UserError(
            f"{world_size} ranks cannot be divided into expert_model_parallel_size {ep} x expert_tensor_parallel_size "
            f"{etp} x pipeline_model_parallel_size {pp} = {ep * etp * pp}",
            where="config: parallel",
            mend="lower parallel.expert_model_parallel_size or expert_tensor_parallel_size",
        )


def check_port(port: int, address: str = "") -> None:
    """Refuse a rendezvous port that rank 0 could not listen on.

    Args:
        port: of the rendezvous (MASTER_PORT).
        address: to listen on; by default all of this machine's.

    Raises:
        UserError: the port is taken, or no port at all.
    """
    try:
        with socket.create_server((address, port)):
            return
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on port {port}: {reason}",
            where="MASTER_PORT",
            mend="choose a free port, or leave it out and let the launcher choose one",
        ) from error


def check_model(hf_config: Mapping[str, Any], parallel: ParallelConfig, where: str) -> None:
    """Refuse a model that the layout does not divide, or that uses what is not supported."""
    _check_features(hf_config, where)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    heads, groups = _count(hf_config, "num_attention_heads", where), _count(hf_config, "num_key_value_heads", where)
    _check_divides(heads, tp, "num_attention_heads", "tensor_model_parallel_size", where)
    _check_divides(heads, groups, "num_attention_heads", "num_key_value_heads", where)
    if groups % tp and tp % groups:
        raise UserError(
            f"num_key_value_heads {groups} and tensor_model_parallel_size {tp} do not divide one another",
            where=where,
            mend=f"set parallel.tensor_model_parallel_size to a divisor or a multiple of {groups}",
        )
    _check_divides(
        _count(hf_config, "intermediate_size", where), tp, "intermediate_size", "tensor_model_parallel_size", where
    )
    _check_divides(
        _count(hf_config, "num_hidden_layers", where), pp, "num_hidden_layers", "pipeline_model_parallel_size", where
    )


def _check_features(hf_config: Mapping[str, Any], where: str) -> None:
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UserError(
            f"rope_type {rope_type!r} is not supported",
            where=where,
            mend='set rope_type to "default" in config.json, and keep to the positions the model was trained on',
        )
    for key in ("attention_bias", "use_sliding_window"):
        if hf_config.get(key):
            raise UserError(f"{key} = true is not supported", where=where, mend="use a Qwen3 model without it")
    if hf_config.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"hidden_act {hf_config['hidden_act']!r} is not supported", where=where, mend="use a Qwen3 model (silu)"
        )


def _count(hf_config: Mapping[str, Any], key: str, where: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key} = {value!r} in config.json", where=where, mend="give a complete Qwen3 config.json")
    return value


def _check_divides(value: int, divisor: int, name: str, divisor_name: str, where: str) -> None:
    if value % divisor:
        raise UserError(
            f"{name} {value} is not a multiple of {divisor_name} {divisor}",
            where=where,
            mend=f"choose a {divisor_name} that divides {value}",
        )
