"""vLLM's layers on a CPU under model.batch_invariant: operations.py in place of vLLM's kernels.

On GPUs vLLM has kernels of its own for this, which VLLM_BATCH_INVARIANT turns on. On CPUs it has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.extras.exact_sums import operations
from oblr_megatron.families import head_dim

_library: list[Any] = []  # torch drops the replacements when their library object is freed


def install(spec: EngineSpec) -> None:
    """Replace the kernels of this process: linear layers, norms, rotary embedding, attention, SiLU, log-softmax.

    Raises:
        RuntimeError: this vLLM has other kernels.
    """
    from transformers import AutoConfig
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    config = AutoConfig.from_pretrained(spec.model)
    width = head_dim(config.to_dict())
    cosines, sines = operations.rotary_table(spec.max_model_len, width, config.rope_parameters)

    def rotary(layer: Any, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        parts = (part.view(len(part), -1, width) for part in (query, key))
        turned = [operations.rotate(part, cosines[positions], sines[positions]).flatten(1) for part in parts]
        return turned[0], turned[1]

    replaced: dict[Any, dict[str, Any]] = {
        RMSNorm: {"forward_cpu": _rms_norm},
        SiluAndMul: {"forward_cpu": _silu_and_mul},
        RotaryEmbedding: {"forward_cpu": rotary},
        CPUAttentionBackendImpl: {"do_kv_cache_update": _store, "forward": _attention},
    }
    for owner, methods in replaced.items():
        for name, method in methods.items():
            if not hasattr(owner, name):
                raise RuntimeError(f"this vLLM has no {owner.__name__}.{name}: batch_invariant cannot replace it")
            setattr(owner, name, method)
    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", operations.linear, "CPU")
    library.impl("_log_softmax", _log_softmax, "CPU")
    _library.append(library)


def _log_softmax(scores: Tensor, dim: int, half_to_float: bool) -> Tensor:
    assert dim in (-1, scores.dim() - 1), f"log-softmax over dimension {dim}"
    return operations.log_softmax(scores)


def _rms_norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return operations.rms_norm(x, norm.weight, norm.variance_epsilon)
    added = x + residual
    return operations.rms_norm(added, norm.weight, norm.variance_epsilon), added


def _silu_and_mul(_: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return operations.silu(gate) * up


def _store(_: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Keep the tokens' keys and values, in a plain layout: [blocks, groups, block_size, key | value]."""
    block_size = kv_cache.shape[2]
    held = slot_mapping >= 0
    slots = slot_mapping[held]
    rows = torch.cat([key[: len(held)], value[: len(held)]], -1)[held]
    kv_cache[slots // block_size, :, slots % block_size] = rows.to(kv_cache.dtype)


def _attention(
    backend: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: Any,
    output: Tensor,
    **_: None,  # scales of a quantised output: none here
) -> Tensor:
    """Attention of every request in the step: requests with one token together, each other one alone."""
    if metadata is None:  # vLLM warms up
        return output
    starts, lengths = metadata.query_start_loc, metadata.seq_lens
    tokens = starts.diff()
    together = [(tokens == 1).nonzero().flatten(), *(tokens > 1).nonzero()]
    for requests in filter(len, together):
        count, longest = int(tokens[requests[0]]), int(lengths[requests].max())
        keys, values = _held(kv_cache, metadata.block_table[requests], lengths[requests], longest)
        rows = starts[requests, None] + torch.arange(count)
        attended = operations.attention(query[rows], keys, values, backend.scale, lengths[requests])
        output[rows.flatten()] = attended.flatten(0, 1).view(-1, *output.shape[1:])
    return output


def _held(kv_cache: Tensor, blocks: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Keys and values [n, longest, groups, head_dim] of n requests; zero past their lengths [n]."""
    block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
    count = -(-longest // block_size)
    held = kv_cache[blocks[:, :count].long()]  # [n, blocks, groups, block_size, 2 head_dim]
    held = held.transpose(2, 3).flatten(1, 2)[:, :longest]
    held = held.masked_fill((torch.arange(longest) >= lengths[:, None])[..., None, None], 0.0)
    return held[..., :head_dim], held[..., head_dim:]
