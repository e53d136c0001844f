"""Bytes of activations that each layer keeps for backward, counted tensor by tensor. Imports no torch.

The counts hold for one rank with megatron-core's local layers and the attention of `model/cpu/attention.py`. Symbols:
h hidden size; q, kv widths of queries and keys; f feed-forward width; n = b t tokens; n' = n / tp with sequence
parallelism, else n.

    attention   n' h   input of the norm          n qkv   joint projection         n q   contiguous queries
                n' h   input of the projection    n q, n kv   after the rotary embedding     4 t head_dim   cosines
                n q    input of the output projection                              4 n heads   log-sum-exp
    MLP         n' h   input of the norm          n' h   input of the projection
                2 n f  its output                 n f   product

A gated unit in torch operations keeps more: 5 n f with `model.batch_invariant` on a CPU, 6 n f in experts on a CPU.
Transformer Engine's norm copies the keys: n kv more. Nothing has been measured on a GPU yet.

`tests/unit/memory/test_training.py` compares the sums with the tensors that a real step allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.memory.rank_shapes import RankSizes, Tokens

INDEX = 8  # bytes of an int64


def layer_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Bytes that one layer keeps, without full recomputation."""
    again = recomputed_mlp_bytes(sizes, tokens, config)
    own = attention_bytes(sizes, tokens, config) + mlp_bytes(sizes, tokens, config)
    return own + sizes.adapted_tokens(tokens) * sizes.adapter_rank * sizes.element - again


def recomputes(config: Config, module: str) -> bool:
    """Whether selective recomputation covers a module (megatron-core's name)."""
    parallel = config.parallel
    return parallel.recompute_granularity == "selective" and module in parallel.recompute_modules


def _norm_again(sizes: RankSizes, config: Config, *, apart: bool = False) -> bool:
    """Whether a norm is recomputed. In Transformer Engine's layers it is a part of the linear layer, unless `apart`."""
    return recomputes(config, "layernorm") and (apart or not sizes.transformer_engine or sizes.adapter_rank > 0)


def attention_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Bytes kept by norm, projections, rotary embedding and core attention."""
    n = tokens.count
    copied = sizes.groups > 1 and sizes.heads > sizes.groups  # queries are not contiguous in the joint projection
    elements = 2 * tokens.split * sizes.hidden + n * (sizes.qkv + sizes.query * (1 + copied))
    elements += 4 * (n if config.parallel.packing == "packed" else tokens.length) * sizes.head_dim
    elements += n * sizes.kv * sizes.transformer_engine
    elements -= tokens.split * sizes.hidden * _norm_again(sizes, config)
    return elements * sizes.element + _core_bytes(sizes, tokens, config)


def mlp_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Bytes that the MLP or the experts need in backward, with their norm."""
    hidden = (2 - _norm_again(sizes, config, apart=sizes.experts > 0)) * tokens.split * sizes.hidden
    # A frozen matrix without adapter keeps no input.
    no_fc1 = sizes.adapter_rank > 0 and not {"gate_proj", "up_proj"} & set(sizes.adapted)
    no_fc2 = sizes.adapter_rank > 0 and "down_proj" not in sizes.adapted
    if not sizes.experts:
        hidden -= tokens.split * sizes.hidden * no_fc1
        widths = (3 if sizes.fused else 5) - no_fc2
        return (hidden + widths * tokens.count * sizes.ffn) * sizes.element
    routed = sizes.routed(tokens)
    widths = (3 if sizes.fused else 6) - recomputes(config, "moe_act") - no_fc2
    elements = hidden + routed * (sizes.hidden * (not no_fc1) + widths * sizes.expert_ffn)
    return elements * sizes.element + _routing_bytes(sizes, tokens)


def recomputed_mlp_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Bytes that selective recomputation of the MLP or the experts drops: all but the norm's."""
    if not recomputes(config, "moe" if sizes.experts else "mlp"):
        return 0
    norm = (2 - _norm_again(sizes, config, apart=sizes.experts > 0)) * tokens.split * sizes.hidden * sizes.element
    return mlp_bytes(sizes, tokens, config) - norm


def glu_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """Additional bytes in the backward of the gated unit: four tensors of width f, minus the product of forward."""
    if sizes.experts:
        return 0
    return 3 * tokens.count * sizes.ffn * sizes.element


def _core_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Bytes of the keys after the rotary embedding and of the core attention's own tensors."""
    n, element = tokens.count, sizes.element
    recomputed = recomputes(config, "core_attn")
    if recomputed:
        return n * (sizes.kv + sizes.query) * element
    sums = n * sizes.heads * sizes.wide
    if sizes.transformer_engine and element > 2:  # its attention without flash kernels: all probabilities
        sums += n * tokens.length * sizes.heads * element
    if sizes.cp == 1:
        return n * (sizes.kv + sizes.query) * element + sums
    if sizes.transformer_engine:  # a ring: one more set of keys and values is in transit
        return n * (3 * sizes.kv + sizes.query) * element + sums
    # keys and values are gathered; queries and results of two chunks are concatenated
    return n * 2 * (sizes.cp * sizes.kv + sizes.query) * element + sums + mask_bytes(sizes, tokens)


def mask_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """Bytes of the masks of a context-parallel rank: its two chunks against all earlier keys."""
    if sizes.cp == 1 or not sizes.masked:
        return 0
    chunk = tokens.length // 2
    return (2 * sizes.cp + 1) * chunk * chunk * sizes.element


def _routing_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """Bytes of the router's scores and of the routing indices."""
    split, experts = tokens.split, sizes.experts
    return split * experts * (3 * sizes.wide + 1) + sizes.routed(tokens) * (3 * INDEX + 3 * sizes.wide)
