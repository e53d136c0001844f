"""What autograd keeps of a microbatch in each layer until its backward, counted tensor by tensor. Imports no torch.

Bytes on one rank, of megatron-core's local layers with the attention of `model/attention.py`. h hidden, q and kv widths
of queries and of keys, f of the feed-forward, n = b t tokens, n' of them under sequence parallelism (n otherwise):

    attention   n' h   input of the norm          n qkv   the joint projection     n q   queries made contiguous
                n' h   input of the projection    n q, n kv   after the rotary embedding     4 t head_dim   its cosines
                n q    input of the output projection, as the kernel made it       4 n heads   its log-sum-exp
    MLP         n' h   input of the norm          n' h   input of the projection
                2 n f  its output                 n f   silu          n f   the other half plus 0          n f   product

A GPU's gated unit is one kernel, which keeps its input and its result alone: 3 n f instead of 5 n f. Transformer
Engine's norm of the keys copies them: n kv. Neither has yet been measured on a GPU.

`tests/unit/memory/test_training.py` holds the sums against the tensors that a real step allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.memory.rank_shapes import RankSizes, Tokens

INDEX = 8  # bytes of an int64


def layer_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Kept of one layer until its backward, without recomputation of whole layers."""
    again = recomputed_mlp_bytes(sizes, tokens, config)
    return attention_bytes(sizes, tokens, config) + mlp_bytes(sizes, tokens, config) - again


def recomputes(config: Config, module: str) -> bool:
    """Whether `recompute_granularity` "selective" covers a module, by megatron-core's name."""
    parallel = config.parallel
    return parallel.recompute_granularity == "selective" and module in parallel.recompute_modules


def attention_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Kept of a layer's first half: norm, projections, rotary embedding, core attention."""
    n = tokens.count
    copied = sizes.groups > 1 and sizes.heads > sizes.groups  # queries are not contiguous in the joint projection
    elements = 2 * tokens.split * sizes.hidden + n * (sizes.qkv + sizes.query * (1 + copied))
    elements += 4 * (n if config.parallel.packing == "packed" else tokens.length) * sizes.head_dim
    elements += n * sizes.kv * sizes.transformer_engine
    elements -= tokens.split * sizes.hidden * recomputes(config, "layernorm")
    return elements * sizes.element + _core_bytes(sizes, tokens, config)


def mlp_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Made by a layer's second half and wanted by its backward."""
    hidden = (2 - recomputes(config, "layernorm")) * tokens.split * sizes.hidden
    if not sizes.experts:
        return (hidden + (3 if sizes.fused else 5) * tokens.count * sizes.ffn) * sizes.element
    routed = sizes.routed(tokens)
    widths = (3 if sizes.fused else 6) - recomputes(config, "moe_act")
    elements = hidden + routed * (sizes.hidden + widths * sizes.expert_ffn)
    return elements * sizes.element + _routing_bytes(sizes, tokens)


def recomputed_mlp_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Of a layer's second half, what "selective" drops after the forward and makes again: all but its norm."""
    if not recomputes(config, "moe" if sizes.experts else "mlp"):
        return 0
    norm = (2 - recomputes(config, "layernorm")) * tokens.split * sizes.hidden * sizes.element
    return mlp_bytes(sizes, tokens, config) - norm


def glu_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """What the backward of the gated unit holds beyond what was kept: three gradients of width f, less one product."""
    if sizes.experts:
        return 0
    return 2 * tokens.count * sizes.ffn * sizes.element


def _core_bytes(sizes: RankSizes, tokens: Tokens, config: Config) -> int:
    """Keys after the rotary embedding, and what the core attention keeps beside queries, keys and values."""
    n, element = tokens.count, sizes.element
    recomputed = recomputes(config, "core_attn")
    if config.model.attention == "local":
        if recomputed:
            return n * (sizes.kv + sizes.query) * element
        probabilities = element + (sizes.wide if element < sizes.wide else 0)  # softmax in fp32, and rounded
        return 3 * n * sizes.query * element + score_elements(sizes, tokens) * probabilities  # keys, values per head
    if recomputed:
        return n * (sizes.kv + sizes.query) * element
    sums = n * sizes.heads * sizes.wide
    if sizes.cp == 1:
        return n * (sizes.kv + sizes.query) * element + sums
    if sizes.transformer_engine:  # a ring: what is on its way beside this rank's own
        return n * (3 * sizes.kv + sizes.query) * element + sums
    # keys and values gathered; queries and results of two chunks are put together
    return n * 2 * (sizes.cp * sizes.kv + sizes.query) * element + sums + mask_bytes(sizes, tokens)


def score_elements(sizes: RankSizes, tokens: Tokens) -> int:
    """Of the attention's probabilities [b, heads, t, t], which megatron-core's own attention makes."""
    return tokens.rows * sizes.heads * tokens.length**2


def mask_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """Masks of the two chunks of a context-parallel rank against the keys before them; the others need none."""
    if sizes.cp == 1:
        return 0
    chunk = tokens.length // 2
    return (2 * sizes.cp + 1) * chunk * chunk * sizes.element


def _routing_bytes(sizes: RankSizes, tokens: Tokens) -> int:
    """The router's scores, and where each token went."""
    split, experts = tokens.split, sizes.experts
    return split * experts * (3 * sizes.wide + 1) + sizes.routed(tokens) * (3 * INDEX + 3 * sizes.wide)
