"""The name table: `split` and `views` are inverse, match worked examples, and use the names of transformers.

Not covered: that Megatron's weights have this layout (tests/distributed/test_logits.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3ForCausalLM

from oblr_megatron.model.moe import with_global_expert
from oblr_megatron.model.published import published
from oblr_megatron.model.transformer_config import hf_config_of
from oblr_megatron.weights.export import metadata_of
from oblr_megatron.weights.names import ModelShape, entry, layer_of, shard_shape, split, table, views

SMALL = ModelShape(hidden=3, layers=2, heads=4, groups=2, head_dim=1, ffn=4, vocab=5, tied=False)
MIXTURE = ModelShape(
    hidden=3, layers=2, heads=4, groups=2, head_dim=1, ffn=0, vocab=5, tied=False, experts=4, expert_ffn=2
)


@st.composite
def shapes_and_ranks(draw: st.DrawFn) -> tuple[ModelShape, int]:
    """Any valid layout: ranks divide the heads, and divide the KV groups or are divided by them."""
    tp, groups = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 4), (2, 1), (4, 2), (4, 1), (3, 3), (4, 4)]))
    heads = draw(st.integers(1, 3)) * groups * (tp // groups if tp > groups else 1)
    shape = ModelShape(
        hidden=draw(st.integers(1, 5)),
        layers=draw(st.integers(1, 3)),
        heads=heads,
        groups=groups,
        head_dim=4 * draw(st.integers(1, 2)),  # so that a group's rows can be shared by the ranks
        ffn=tp * draw(st.integers(1, 4)),
        vocab=draw(st.integers(1, 9)),
        tied=draw(st.booleans()),
        experts=draw(st.integers(0, 3)),
        expert_ffn=tp * draw(st.integers(1, 4)),
        qkv_bias=draw(st.booleans()),
        qk_norms=draw(st.booleans()),
    )
    return shape, tp


@settings(max_examples=60, deadline=None)
@given(shapes_and_ranks())
def test_merging_all_shards_gives_back_every_tensor(case: tuple[ModelShape, int]) -> None:
    shape, tp = case
    padded = -(-shape.vocab // (2 * tp)) * 2 * tp
    for item in table(shape):
        tensors = [torch.randn(size) for size in item.shapes]
        shards = [
            split(item, tensors, shape, tp_rank=rank, tp_size=tp, padded_vocab=padded).clone() for rank in range(tp)
        ]
        assert {shard.shape for shard in shards} == {shard_shape(item, shape, tp_size=tp, padded_vocab=padded)}
        stacked = torch.stack(shards[: 1 if item.cut == "replicated" else tp])
        found = views(item, stacked, shape)
        assert [name for name, _ in found] == list(item.hf)
        for (name, view), expected in zip(found, tensors, strict=True):
            assert view.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr(), "no copy"
            assert torch.equal(view.reshape(expected.shape), expected), name


def rows(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].expand(-1, 3)


def test_qkv_is_interleaved_by_kv_group() -> None:
    """q1 q2 k1 v1 | q3 q4 k2 v2, one row per head; each of 4 ranks holds half a group's rows."""
    item = entry("decoder.layers.1.self_attention.linear_qkv.weight", SMALL)
    tensors = [rows(1, 2, 3, 4), rows(11, 12), rows(21, 22)]
    whole = split(item, tensors, SMALL, tp_rank=0, tp_size=1, padded_vocab=8)
    assert torch.equal(whole, rows(1, 2, 11, 21, 3, 4, 12, 22))
    last = split(item, tensors, SMALL, tp_rank=3, tp_size=4, padded_vocab=8)
    assert torch.equal(last, rows(12, 22))


def test_biases_are_interleaved_like_their_matrix() -> None:
    shape = replace(SMALL, qkv_bias=True)
    item = entry("decoder.layers.1.self_attention.linear_qkv.bias", shape)
    tensors = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([11.0, 12]), torch.tensor([21.0, 22])]
    whole = split(item, tensors, shape, tp_rank=0, tp_size=1, padded_vocab=8)
    assert whole.tolist() == [1, 2, 11, 21, 3, 4, 12, 22]
    assert split(item, tensors, shape, tp_rank=3, tp_size=4, padded_vocab=8).tolist() == [12, 22]
    with pytest.raises(KeyError):
        entry(item.megatron, SMALL)


def test_each_rank_holds_its_gate_rows_then_its_up_rows() -> None:
    item = entry("decoder.layers.0.mlp.linear_fc1.weight", SMALL)
    shard = split(item, [rows(1, 2, 3, 4), rows(5, 6, 7, 8)], SMALL, tp_rank=1, tp_size=2, padded_vocab=8)
    assert torch.equal(shard, rows(3, 4, 7, 8))


def test_vocabulary_padding_is_zero_and_may_fill_a_rank() -> None:
    item = entry("embedding.word_embeddings.weight", SMALL)
    shards = [split(item, [rows(1, 2, 3, 4, 5)], SMALL, tp_rank=rank, tp_size=4, padded_vocab=16) for rank in range(4)]
    assert torch.equal(shards[1], rows(5, 0, 0, 0))
    assert torch.equal(shards[2], rows(0, 0, 0, 0))


class Recorder:
    """A tensor that records the rows that are read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.read: list[object] = []

    def __getitem__(self, index: object) -> Tensor:
        self.read.append(index)
        return self.tensor[index]


def test_only_the_rows_of_the_shard_are_read() -> None:
    """Two ranks, two KV groups: rank 1 reads query rows 2..4 and row 1 of k and v."""
    item = entry("decoder.layers.0.self_attention.linear_qkv.weight", SMALL)
    sources = [Recorder(rows(1, 2, 3, 4)), Recorder(rows(11, 12)), Recorder(rows(21, 22))]
    split(item, sources, SMALL, tp_rank=1, tp_size=2, padded_vocab=8)
    assert [source.read for source in sources] == [[slice(2, 4)], [slice(1, 2)], [slice(1, 2)]]


UNKNOWN = {
    SMALL: (
        "decoder.layers.2.mlp.linear_fc1.weight",  # a layer too many
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.router.weight",
        "embedding.position_embeddings.weight",
        "module.decoder.final_layernorm.weight",
    ),
    MIXTURE: (
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.4.linear_fc1.weight",  # an expert too many
        "decoder.layers.0.mlp.experts.linear_fc1.weight4",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.weight1",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
    ),
}


def test_an_unknown_name_raises() -> None:
    for shape, name in ((shape, name) for shape, names in UNKNOWN.items() for name in names):
        with pytest.raises(KeyError, match=name):
            entry(name, shape)


def test_transformer_engines_fused_norms_are_the_same_tensors() -> None:
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        item = entry(f"decoder.layers.1.{fused}", SMALL)
        assert item.hf == entry(f"decoder.layers.1.{plain}", SMALL).hf
        assert item.cut == "replicated"
        assert layer_of(item) == 1


def test_an_expert_has_the_same_tensors_in_its_own_module_and_in_a_group() -> None:
    for part, hf in (("linear_fc1", ("gate_proj", "up_proj")), ("linear_fc2", ("down_proj",))):
        own = entry(f"decoder.layers.1.mlp.experts.local_experts.3.{part}.weight", MIXTURE)
        grouped = entry(f"decoder.layers.1.mlp.experts.{part}.weight3", MIXTURE)
        assert own.hf == grouped.hf == tuple(f"model.layers.1.mlp.experts.3.{name}.weight" for name in hf)
        assert own.shapes == grouped.shapes
        assert own.expert == grouped.expert == 3
        assert layer_of(grouped) == 1


def test_only_experts_are_counted_over_expert_parallel_ranks() -> None:
    layer = "decoder.layers.11.mlp."
    for before, after in (
        ("experts.local_experts.1.linear_fc1.weight", "experts.local_experts.13.linear_fc1.weight"),
        ("experts.linear_fc2.weight0", "experts.linear_fc2.weight12"),
        ("router.weight", "router.weight"),
        ("linear_fc1.weight", "linear_fc1.weight"),
    ):
        assert with_global_expert(layer + before, 12) == layer + after
    assert with_global_expert("output_layer.weight", 12) == "output_layer.weight"


def test_a_tied_output_layer_is_the_embedding() -> None:
    tied = ModelShape(hidden=3, layers=2, heads=4, groups=2, head_dim=1, ffn=4, vocab=5, tied=True)
    assert entry("output_layer.weight", tied).hf == ("model.embed_tokens.weight",)
    assert entry("output_layer.weight", SMALL).hf == ("lm_head.weight",)
    assert "output_layer.weight" not in [item.megatron for item in table(tied)]


SIZES = ("0.6B", "8B")
"""A tied and an untied one; tests/unit/checkpoint/test_real_sizes.py has all."""


@pytest.mark.parametrize("size", SIZES)
def test_real_sizes_have_exactly_transformers_tensors(size: str) -> None:
    config = hf_config_of(published(size))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    metadata = metadata_of(table(ModelShape.of(config)), torch.bfloat16)
    assert {meta.name: meta.shape for meta in metadata} == expected
    assert len(metadata) == len(expected)
    assert ModelShape.of(config.to_dict()) == ModelShape.of(config)
    names = [meta.name for meta in metadata]
    for layer in range(config.num_hidden_layers):
        start = names.index(f"model.layers.{layer}.self_attn.q_proj.weight")
        assert [name.rsplit(".", 2)[1] for name in names[start : start + 3]] == ["q_proj", "k_proj", "v_proj"]
        start = names.index(f"model.layers.{layer}.mlp.gate_proj.weight")
        assert names[start + 1] == f"model.layers.{layer}.mlp.up_proj.weight"


MIXTURES = {"30B-A3B": 30.5, "235B-A22B": 235.1}
"""Parameters as the model cards give them, in billions."""


@pytest.mark.parametrize("size", MIXTURES)
def test_real_mixtures_have_exactly_the_published_tensors(size: str) -> None:
    """The names are those of model.safetensors.index.json; each expert has three tensors there."""
    values = published(size)
    config = hf_config_of(values)
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    experts, ffn = values["num_experts"], values["moe_intermediate_size"]
    metadata = metadata_of(table(ModelShape.of(config)), torch.bfloat16)
    shapes = {meta.name: meta.shape for meta in metadata}
    assert len(shapes) == len(metadata) == 3 + layers * (9 + 3 * experts)
    last = f"model.layers.{layers - 1}.mlp"
    assert shapes[f"{last}.gate.weight"] == (experts, hidden)
    assert shapes[f"{last}.experts.{experts - 1}.gate_proj.weight"] == (ffn, hidden)
    assert shapes[f"{last}.experts.{experts - 1}.up_proj.weight"] == (ffn, hidden)
    assert shapes[f"{last}.experts.{experts - 1}.down_proj.weight"] == (hidden, ffn)
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9, 1) == MIXTURES[size]
    assert ModelShape.of(values) == ModelShape.of(config)
