"""Names and shapes of all tensors of the published sizes, on the meta device.

Three sources must agree: our table, megatron-core's sharded state of a GPTModel, and what transformers saves. Not
covered: the published files (0.6B and 1.7B also store the tied output layer, which is allowed).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from oblr_megatron.checkpoint.pieces import NAMINGS, Piece, meta_model, pieces_of, sharded_state, single_process
from oblr_megatron.config import ModelConfig
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.published import HERE
from oblr_megatron.model.transformer_config import HFConfig
from oblr_megatron.weights.names import ModelShape, table

PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3.1-8B": 8_030_261_248,
}  # from the model cards; a tied embedding counts once
MIXTURES = [size for size in PARAMETERS if "-A" in size]
FEW = 4  # layers; the others have the same tensors
SIZES = [
    *((size, None) for size in PARAMETERS if size not in MIXTURES),
    ("Qwen3-30B-A3B", FEW),
    *(pytest.param(size, None, marks=pytest.mark.nightly) for size in MIXTURES),
]

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    with single_process() as parallel:
        yield parallel


def config_of(size: str, layers: int | None = None) -> HFConfig:
    """The published config, with all layers or fewer."""
    return AutoConfig.from_pretrained(HERE / f"{size}.json", **({"num_hidden_layers": layers} if layers else {}))


def saved_by_transformers(config: HFConfig) -> Shapes:
    """Names and shapes that save_pretrained writes; tied tensors once, each expert separately."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = revert_weight_conversion(model, dict(model.state_dict()))
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize(("size", "layers"), SIZES)
def test_table_plan_and_transformers_name_the_same_tensors(size: str, layers: int | None, parallel: Parallel) -> None:
    config = config_of(size, layers)
    shape = ModelShape.of(config)
    expected = saved_by_transformers(config)
    parameters = sum(map(prod, expected.values()))
    assert layers or parameters == PARAMETERS[size]
    named = [(name, where) for item in table(shape) for name, where in zip(item.hf, item.shapes, strict=True)]
    assert len(named) == len(expected) and dict(named) == expected
    model = meta_model(config, ModelConfig.model_validate({"path": HERE, "dtype": "bfloat16"}), parallel)
    pieces = pieces_of(sharded_state(model), shape)
    planned = [(name, where) for piece in pieces for name, where in zip(piece.hf, piece.shapes, strict=True)]
    assert len(planned) == len(expected) and dict(planned) == expected
    assert sum(prod(piece.sharded.local_shape) for piece in pieces) == parameters  # no vocabulary needs padding
    check_stored(pieces)


def check_stored(pieces: list[Piece]) -> None:
    """Pieces fill their tensor without overlap, and have as many elements as their Hugging Face tensors."""
    volumes: dict[str, int] = {}
    sizes: dict[str, int] = {}
    places = set()
    for piece in pieces:
        sharded = piece.sharded
        assert sharded.data.is_meta and sharded.dtype == torch.bfloat16
        assert prod(sharded.local_shape) == sum(map(prod, piece.shapes)), sharded.key
        volumes[sharded.key] = volumes.get(sharded.key, 0) + prod(sharded.local_shape)
        sizes[sharded.key] = prod(sharded.global_shape)
        places.add((sharded.key, sharded.global_offset))
    assert volumes == sizes and len(places) == len(pieces)


@pytest.mark.parametrize(
    ("size", "layers", "keys"),
    [
        (
            "Qwen3-0.6B",
            None,
            {
                "embedding.word_embeddings.weight": (151936, 1024),
                "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (28, 1024),
                "decoder.layers.self_attention.linear_qkv.weight": (28, 4096, 1024),
                "decoder.layers.self_attention.linear_proj.weight": (28, 1024, 2048),
                "decoder.layers.self_attention.q_layernorm.weight": (28, 128),
                "decoder.layers.self_attention.k_layernorm.weight": (28, 128),
                "decoder.layers.mlp.linear_fc1.layer_norm_weight": (28, 1024),
                "decoder.layers.mlp.linear_fc1.weight": (28, 6144, 1024),
                "decoder.layers.mlp.linear_fc2.weight": (28, 1024, 3072),
                "decoder.final_layernorm.weight": (1024,),
            },
        ),
        (
            "Qwen3-30B-A3B",
            FEW,
            {
                "embedding.word_embeddings.weight": (151936, 2048),
                "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (FEW, 2048),
                "decoder.layers.self_attention.linear_qkv.weight": (FEW, 5120, 2048),
                "decoder.layers.self_attention.linear_proj.weight": (FEW, 2048, 4096),
                "decoder.layers.self_attention.q_layernorm.weight": (FEW, 128),
                "decoder.layers.self_attention.k_layernorm.weight": (FEW, 128),
                "decoder.layers.pre_mlp_layernorm.weight": (FEW, 2048),
                "decoder.layers.mlp.router.weight": (FEW, 128, 2048),
                "decoder.layers.mlp.experts.experts.linear_fc1.weight": (FEW, 128, 1536, 2048),
                "decoder.layers.mlp.experts.experts.linear_fc2.weight": (FEW, 128, 2048, 768),
                "decoder.final_layernorm.weight": (2048,),
                "output_layer.weight": (151936, 2048),
            },
        ),
    ],
)
def test_stored_keys_and_shapes(size: str, layers: int | None, keys: Shapes, parallel: Parallel) -> None:
    """Keys are independent of the layout; norms have Transformer Engine's names."""
    config = config_of(size, layers)
    model = meta_model(config, ModelConfig.model_validate({"path": HERE, "dtype": "bfloat16"}), parallel)
    shape = ModelShape.of(config)
    pieces, *others = [pieces_of(sharded_state(model, naming), shape) for naming in NAMINGS]
    for named in (pieces, *others):
        check_stored(named)
    assert {piece.sharded.key: tuple(piece.sharded.global_shape) for piece in pieces} == keys
