"""Qwen3-30B-A3B over expert-parallel ranks: each expert is on the right rank, under its published name.

megatron-core builds every rank's model on the meta device, in the published sizes with 4 layers. Not covered: values
(tests/distributed/test_export.py, test_convert.py).
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model.policy import Policy, build_model
from oblr_megatron.model.published import published
from oblr_megatron.model.transformer_config import transformer_config_of
from oblr_megatron.preflight.fake_ranks import standing_as
from oblr_megatron.weights.names import ModelShape, entry, shard_shape

LAYERS, EXPERTS, VOCAB = 4, 128, 151_936
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {  # name -> (ranks, sizes, ranks that hold an expert's tensor)
    "ep8": (8, {"expert_model_parallel_size": 8}, 1),
    "tp2 ep4, whole experts": (
        8,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        2,
    ),
    "tp2 ep2, cut experts": (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, 2),
    "pp2 ep2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, 1),
}


def published_names() -> set[str]:
    """The names in the safetensors index of Qwen/Qwen3-30B-A3B, for the first layers."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        names |= {f"{layer}.self_attn.{part}.weight" for part in attention} | {f"{layer}.mlp.gate.weight"}
        names |= {f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
        names |= {
            f"{layer}.mlp.experts.{expert}.{part}.weight"
            for expert in range(EXPERTS)
            for part in ("gate_proj", "up_proj", "down_proj")
        }
    return names


def held_by(rank: int, ranks: int, options: ParallelConfig) -> list[str]:
    """Published names of one rank's shards; checks the size of each shard."""
    hf_config = Qwen3MoeConfig.from_dict(published("30B-A3B") | {"num_hidden_layers": LAYERS})
    config, shape = ModelConfig.model_validate({"path": "unused", "dtype": "bfloat16"}), ModelShape.of(hf_config)
    with standing_as(rank, ranks, options) as parallel:
        transformer = transformer_config_of(hf_config, config, parallel, options)
        model = build_model(hf_config, transformer, config, parallel, VOCAB)
        policy: Any = SimpleNamespace(
            chunks=[SimpleNamespace(module=model)], transformer_config=transformer, parallel=parallel
        )
        policy._global_name = lambda module, name: Policy._global_name(policy, module, name)
        names = []
        for name, parameter in Policy.named_parameters(policy):
            item = entry(name, shape)
            cut = parallel.tp_size if item.expert is None else parallel.etp_size
            assert tuple(parameter.shape) == shard_shape(item, shape, tp_size=cut, padded_vocab=VOCAB), name
            names += item.hf
    return names


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_expert_is_on_the_right_ranks_under_its_published_name(name: str) -> None:
    ranks, sizes, copies = LAYOUTS[name]
    options = ParallelConfig.model_validate(sizes | {"sequence_parallel": "tensor_model_parallel_size" in sizes})
    held = Counter(hf for rank in range(ranks) for hf in held_by(rank, ranks, options))
    assert held.keys() == published_names()
    experts = {count for hf, count in held.items() if ".experts." in hf}
    assert experts == {copies}, "ranks that hold each expert's tensors"
