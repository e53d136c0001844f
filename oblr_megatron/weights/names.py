"""Maps Megatron's parameter names to Hugging Face's, and defines how each parameter is cut.

Imports no torch at load, so that files are checked before it is there.

    table(shape)                   # every parameter of a model, in export order
    split(item, tensors, ...)      # one tensor-parallel shard; the tensors may be slices of files, read where needed
    views(item, stacked, shape)    # the Hugging Face tensors again, without copies

Unknown names raise. How a parameter is cut over tp ranks:

    replicated   every rank holds the whole (norms)
    rows         along dimension 0, in the order of the ranks
    columns      along dimension 1
    vocab        rows, after padding with zero rows to the padded vocabulary
    gate_up      each rank holds its rows of gate, then its rows of up
    qkv          rows of the matrix [q-heads of group 0, k 0, v 0, q-heads of group 1, k 1, v 1, ...], or elements of
                 the bias; with more ranks than KV groups, a rank holds part of a group

An expert of a mixture is on one expert-parallel rank, and is cut over the expert-tensor-parallel ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.families import EMBEDDING, OUTPUT, family_of, head_dim

if TYPE_CHECKING:
    from torch import Tensor

Cut = Literal["replicated", "rows", "columns", "vocab", "gate_up", "qkv"]


class Sliceable(Protocol):
    """A tensor, or a safetensors slice of a tensor on disk."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and facts of a model that determine names and cuts.

    Example, Qwen3-0.6B: ModelShape(hidden=1024, layers=28, heads=16, groups=8, head_dim=128, ffn=3072, vocab=151936,
                                    tied=True)
    """

    hidden: int
    layers: int
    heads: int
    groups: int  # KV heads
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0  # 0: the model is dense
    expert_ffn: int = 0
    qkv_bias: bool = False
    qk_norms: bool = True

    @classmethod
    def of(cls, hf_config: Any) -> ModelShape:
        """Sizes from a transformers configuration, or from the dict of a config.json.

        Raises:
            UserError: the architecture is not supported.
        """
        values = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
        family = family_of(values)
        return cls(
            hidden=values["hidden_size"],
            layers=values["num_hidden_layers"],
            heads=values["num_attention_heads"],
            groups=values["num_key_value_heads"],
            head_dim=head_dim(values),
            ffn=values["intermediate_size"],
            vocab=values["vocab_size"],
            tied=values.get("tie_word_embeddings", False),
            experts=num_experts(values),
            expert_ffn=values["moe_intermediate_size"] if num_experts(values) else 0,
            qkv_bias=family.qkv_bias,
            qk_norms=family.qk_norms,
        )


def read_shape(model: Path) -> ModelShape:
    """Sizes of the model in a Hugging Face directory."""
    return ModelShape.of(json.loads((model / "config.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter and its Hugging Face tensors.

    Example: Entry("decoder.layers.0.mlp.linear_fc1.weight", "gate_up",
                   ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"), ((3072, 1024),) * 2)
    In a mixture: Entry("decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight", "columns",
                        ("model.layers.0.mlp.experts.7.down_proj.weight",), ((2048, 768),), expert=7)
    """

    megatron: str
    cut: Cut
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the whole tensors, unpadded, one for each name in hf
    expert: int | None = None  # number of its expert, counted over all expert-parallel ranks


FINAL_NORM = "decoder.final_layernorm.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Transformer Engine fuses a norm into the linear layer after it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_IN_LAYER: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "self_attention.linear_qkv.weight": (
        "qkv",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.linear_qkv.bias": (
        "qkv",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("replicated", ("mlp.gate.weight",)),
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
}
_DENSE_ONLY = {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
_MIXTURE_ONLY = {"mlp.router.weight"}
_QKV_BIAS = {"self_attention.linear_qkv.bias"}
_QK_NORMS = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
# One module per expert, or Transformer Engine's grouped layer with one weight per expert: "... linear_fc2.weight7".
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))")
_IN_EXPERT: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "linear_fc1": ("gate_up", ("gate_proj.weight", "up_proj.weight")),
    "linear_fc2": ("columns", ("down_proj.weight",)),
}


@lru_cache(maxsize=4)  # called several times per push
def table(shape: ModelShape) -> tuple[Entry, ...]:
    """Every parameter, in export order: embedding, layers, final norm, output layer unless tied.

    Experts have the names of separate modules, not those of a grouped layer.
    """
    names = [EMBEDDING]
    for layer in range(shape.layers):
        experts = [f"local_experts.{expert}.{part}.weight" for expert in range(shape.experts) for part in _IN_EXPERT]
        inside = _outside_experts(shape) + [f"mlp.experts.{name}" for name in experts]
        names += [f"decoder.layers.{layer}.{name}" for name in inside]
    names += [FINAL_NORM] if shape.tied else [FINAL_NORM, OUTPUT]
    return tuple(entry(name, shape) for name in names)


def entry(name: str, shape: ModelShape) -> Entry:
    """Look up a global Megatron parameter name.

    With tied embeddings `output_layer.weight`, the last pipeline stage's copy, maps to the embedding.

    Raises:
        KeyError: the model has no such parameter.
    """
    vocab_matrix = ((shape.vocab, shape.hidden),)
    if name == EMBEDDING:
        return Entry(name, "vocab", (HF_EMBEDDING,), vocab_matrix)
    if name == OUTPUT:
        return Entry(name, "vocab", (HF_EMBEDDING if shape.tied else HF_OUTPUT,), vocab_matrix)
    if name == FINAL_NORM:
        return Entry(name, "replicated", ("model.norm.weight",), ((shape.hidden,),))
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) >= shape.layers:
        raise KeyError(f"unknown Megatron parameter {name!r}")
    inside = _FUSED_NORMS.get(match[2], match[2])
    of_expert = _EXPERT.fullmatch(inside)
    if of_expert is not None and (expert := int(of_expert[1] or of_expert[4])) < shape.experts:
        part = of_expert[2] or of_expert[3]
        cut, hf = _IN_EXPERT[part]
        names = tuple(f"model.layers.{match[1]}.mlp.experts.{expert}.{tensor}" for tensor in hf)
        return Entry(name, cut, names, _mlp_shapes(part, shape.expert_ffn, shape), expert)
    if inside not in _outside_experts(shape):
        raise KeyError(f"unknown Megatron parameter {name!r}")
    cut, hf = _IN_LAYER[inside]
    return Entry(name, cut, tuple(f"model.layers.{match[1]}.{tensor}" for tensor in hf), _shapes(inside, shape))


def _outside_experts(shape: ModelShape) -> list[str]:
    """Names of a layer's parameters other than experts, in export order."""
    absent = _DENSE_ONLY if shape.experts else _MIXTURE_ONLY
    absent = absent | (set() if shape.qkv_bias else _QKV_BIAS) | (set() if shape.qk_norms else _QK_NORMS)
    return [name for name in _IN_LAYER if name not in absent]


def layer_of(item: Entry) -> int | None:
    """The parameter's layer, counted over the whole model; None outside the layers."""
    match = _LAYER.fullmatch(item.megatron)
    return int(match[1]) if match else None


def _shapes(inside: str, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    return {
        "self_attention.linear_qkv.weight": ((queries, shape.hidden), (keys, shape.hidden), (keys, shape.hidden)),
        "self_attention.linear_qkv.bias": ((queries,), (keys,), (keys,)),
        "self_attention.linear_proj.weight": ((shape.hidden, queries),),
        "self_attention.q_layernorm.weight": ((shape.head_dim,),),
        "self_attention.k_layernorm.weight": ((shape.head_dim,),),
        "mlp.linear_fc1.weight": _mlp_shapes("linear_fc1", shape.ffn, shape),
        "mlp.linear_fc2.weight": _mlp_shapes("linear_fc2", shape.ffn, shape),
        "mlp.router.weight": ((shape.experts, shape.hidden),),
        "input_layernorm.weight": ((shape.hidden,),),
        "pre_mlp_layernorm.weight": ((shape.hidden,),),
    }[inside]


def _mlp_shapes(part: str, ffn: int, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    return ((ffn, shape.hidden),) * 2 if part == "linear_fc1" else ((shape.hidden, ffn),)


def split(
    item: Entry, tensors: Sequence[Sliceable], shape: ModelShape, *, tp_rank: int, tp_size: int, padded_vocab: int
) -> Tensor:
    """One rank's shard.

    Args:
        item: the parameter.
        tensors: the whole Hugging Face tensors, in the order of `item.hf`; only what the shard needs is read.
        shape: the model's sizes.
        tp_rank: of the shard; the expert-tensor-parallel rank for an expert.
        tp_size: number of shards; the expert-tensor-parallel size for an expert.
        padded_vocab: rows of the vocabulary matrices with padding, over all ranks.
    """
    import torch

    if item.cut == "replicated":
        return tensors[0][:]
    if item.cut == "columns":
        start, stop = _share(item.shapes[0][1], tp_rank, tp_size)
        return tensors[0][:, start:stop]
    if item.cut == "gate_up":
        start, stop = _share(item.shapes[0][0], tp_rank, tp_size)
        return torch.cat([tensor[start:stop] for tensor in tensors])
    if item.cut == "vocab":
        start, stop = _share(padded_vocab, tp_rank, tp_size)
        rows = tensors[0][min(start, shape.vocab) : min(stop, shape.vocab)]
        padding = rows.new_zeros(stop - start - rows.shape[0], shape.hidden)
        return torch.cat([rows, padding]) if len(padding) else rows
    return _split_qkv(item, tensors, shape, tp_rank, tp_size)


def views(item: Entry, stacked: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """The whole Hugging Face tensors from all shards in rank order; the inverse of `split`.

    They are views with the tensors' elements in row-major order, in up to four dimensions. With more ranks than KV
    groups, q, k and v are views only if the shards are contiguous; otherwise they are copied.

    `stacked` has all ranks' shards on top of each other, [ranks, *shard]; of what every rank holds whole, [1, *shard].

    Example: of linear_fc2, cut by columns over 2 ranks, [2, hidden, ffn / 2] -> [hidden, 2, ffn / 2].
    """
    if item.cut == "replicated":
        return [(item.hf[0], stacked[0])]
    if item.cut == "columns":
        return [(item.hf[0], stacked.transpose(0, 1))]
    if item.cut == "vocab":
        return [(item.hf[0], stacked.flatten(0, 1)[: shape.vocab])]
    if item.cut == "gate_up":
        halves = stacked.unflatten(1, (2, -1))
        return [(name, halves[:, part]) for part, name in enumerate(item.hf)]
    ranks = len(stacked)
    if shape.groups % ranks:  # a group lies on several ranks: its rows are at no constant distance
        stacked, ranks = stacked.reshape(1, -1, *stacked.shape[2:]), 1
    grouped = stacked.unflatten(1, (shape.groups // ranks, -1))
    return list(zip(item.hf, grouped.split(_group_rows(shape), dim=2), strict=True))


def shard_shape(item: Entry, shape: ModelShape, *, tp_size: int, padded_vocab: int) -> tuple[int, ...]:
    """Shape of one rank's shard; arguments as of `split`."""
    rows, *columns = item.shapes[0]
    if item.cut == "replicated":
        return item.shapes[0]
    if item.cut == "columns":
        return rows, columns[0] // tp_size
    if item.cut == "vocab":
        return padded_vocab // tp_size, *columns
    return sum(size[0] for size in item.shapes) // tp_size, *columns


def _share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    assert size % ranks == 0, f"{size} rows cannot be shared by {ranks} ranks"
    return size // ranks * rank, size // ranks * (rank + 1)


def _group_rows(shape: ModelShape) -> tuple[int, int, int]:
    """Rows of q, k and v in one KV group."""
    return shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim


def _split_qkv(item: Entry, tensors: Sequence[Sliceable], shape: ModelShape, tp_rank: int, tp_size: int) -> Tensor:
    """Read the KV groups that overlap the shard, interleave them, and cut out the shard.

    Example: 2 groups of 2 query heads, head_dim 4, so 16 rows a group. tp_size 2, rank 1: rows 16..32, group 1 alone.
    tp_size 4, rank 3: rows 24..32, the second half of group 1.
    """
    import torch

    rows, columns = _group_rows(shape), item.shapes[0][1:]  # a bias has no columns
    start, stop = _share(sum(rows) * shape.groups, tp_rank, tp_size)
    first, last = start // sum(rows), -(-stop // sum(rows))
    parts = [
        tensor[first * count : last * count].reshape(last - first, count, *columns)
        for tensor, count in zip(tensors, rows, strict=True)
    ]
    interleaved = torch.cat(parts, dim=1).flatten(0, 1)
    offset = first * sum(rows)
    return interleaved[start - offset : stop - offset]
