"""The supported families of models: what a config.json's model_type says about the layers. Imports no torch.

    family_of(hf_config).qkv_bias        # whether q, k and v have biases
    head_dim(hf_config)                  # 128, also where config.json leaves it out

A family is one entry of `FAMILIES` and its configurations in `model/published/`. All other code asks for these facts:
names and cuts of tensors (`weights/names.py`), layers (`model/policy.py`), sizes and FLOPs, and the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oblr_megatron.errors import UserError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
"""megatron-core's names of the parameters of vocabulary size, which a model may tie."""
OF_MLP = ("gate_proj", "up_proj", "down_proj")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", *OF_MLP)
"""Hugging Face's names of a layer's matrices."""


@dataclass(frozen=True, slots=True)
class Family:
    """Decoders with RMSNorm, rotary embedding, grouped-query attention and a gated MLP; the rest are these facts."""

    name: str
    model_type: str  # in config.json
    architecture: str  # in config.json
    qkv_bias: bool = False  # q, k and v have biases; no other matrix has one
    qk_norms: bool = False  # the heads of queries and keys are normalised
    states_head_dim: bool | None = False  # config.json gives head_dim; None: it may, else hidden_size / heads
    rope_types: tuple[str, ...] = ("default",)
    published: tuple[str, ...] = ()  # models with a configuration in model/published/
    owner: str = "Qwen"  # of these models, on the hub


FAMILIES: tuple[Family, ...] = (
    Family(
        name="Qwen3",
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        qk_norms=True,
        states_head_dim=True,
        published=("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"),
    ),
    Family(
        name="Qwen3-MoE",
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        qk_norms=True,
        states_head_dim=True,
        published=("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
    ),
    Family(
        name="Qwen2",  # also Qwen2.5 and R1-Distill-Qwen
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        published=("Qwen2.5-7B", "Qwen2.5-32B"),
    ),
    Family(
        name="Llama",  # Llama 3 and R1-Distill-Llama
        model_type="llama",
        architecture="LlamaForCausalLM",
        states_head_dim=None,
        rope_types=("default", "llama3"),
        published=("Llama-3.1-8B",),
        owner="meta-llama",
    ),
)
LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Of rope_type "llama3": megatron-core computes with these values, and reads only `factor`. All of Llama 3 has them."""


def family_of(hf_config: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family of a model.

    Raises:
        UserError: the architecture is not supported.
    """
    names = hf_config.get("architectures") or []
    for family in FAMILIES:
        if family.model_type == hf_config.get("model_type") and names in ([family.architecture], []):
            return family
    supported = ", ".join(f"{family.name} ({family.architecture})" for family in FAMILIES)
    raise UserError(
        f"model_type {hf_config.get('model_type')!r} with architectures {names!r} is not supported",
        where=where,
        fix=f"give a model of one of these families: {supported}",
    )


def head_dim(hf_config: Mapping[str, Any]) -> int:
    """Width of a head, from the model's config.json."""
    return int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])
