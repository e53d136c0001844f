"""Parameters and FLOPs compared with transformers' models and torch's FLOP counter.

Not covered: extra FLOPs of a Megatron layout (padding, recomputation), which these counts leave out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from oblr_megatron.model.published import NAMES, published
from oblr_megatron.model.transformer_config import hf_config_of
from oblr_megatron.observe.performance.flops import active_parameters, forward_flops, total_parameters, training_flops
from tests.tiny import tiny_config, tiny_config_of, tiny_moe_config

HAND = {
    "model_type": "qwen3",
    "hidden_size": 4,
    "head_dim": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}


def on_meta(config: Qwen3Config | Qwen3MoeConfig) -> torch.nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


def parameters(model: torch.nn.Module) -> int:
    """Number of weights; a tied weight counts once."""
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_every_published_size_are_transformers_own(name: str) -> None:
    hf = published(name)
    assert total_parameters(hf) == parameters(on_meta(hf_config_of(hf)))


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(tie_word_embeddings=True),
        tiny_config_of("qwen2"),
        tiny_config_of("llama"),
        tiny_moe_config(),
    ],
    ids=["untied", "tied", "qwen2", "llama", "experts"],
)
def test_parameters_of_tiny_models_are_transformers_own(config: Qwen3Config | Qwen3MoeConfig) -> None:
    assert total_parameters(config.to_dict()) == parameters(on_meta(config))


@pytest.mark.parametrize(("name", "total", "active"), [("30B-A3B", 30.5, 3.3), ("235B-A22B", 235.0, 22.0)])
def test_active_parameters_of_the_mixtures_are_those_in_their_names(name: str, total: float, active: float) -> None:
    """Billions of parameters, from the model cards."""
    hf = published(name)
    assert total_parameters(hf) / 1e9 == pytest.approx(total, rel=0.005)
    assert active_parameters(hf) / 1e9 == pytest.approx(active, rel=0.02)


def test_all_parameters_of_a_dense_model_are_active() -> None:
    hf = published("8B")
    assert active_parameters(hf) == total_parameters(hf)


def counted(model: torch.nn.Module, vocabulary: int, length: int) -> int:
    """FLOPs of one row by torch's counter; with eager attention it counts all pairs."""
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, vocabulary, (1, length)), use_cache=False)
    return int(counter.get_total_flops())


def masked_pairs(hf: dict[str, Any], length: int) -> float:
    """FLOPs of the pairs that the causal mask removes, in all layers."""
    query = hf["num_attention_heads"] * hf["head_dim"]
    return 4.0 * hf["num_hidden_layers"] * query * (length * (length - 1) // 2)


@pytest.mark.parametrize("config", [tiny_config(), tiny_moe_config()], ids=["dense", "experts"])
def test_a_forward_pass_costs_what_torch_counts(config: Qwen3Config | Qwen3MoeConfig) -> None:
    """Each expert runs on the tokens routed to it, so the counter sees only active experts."""
    hf = config.to_dict()
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = AutoModelForCausalLM.from_config(config)
    expected = forward_flops(hf, [24]) + masked_pairs(hf, 24)
    assert counted(model, config.vocab_size, 24) == pytest.approx(expected, rel=1e-12)
    assert counted(model.model, config.vocab_size, 24) == pytest.approx(
        expected - 2 * 24 * hf["hidden_size"] * hf["vocab_size"]
    )


def test_flops_of_a_model_computed_by_hand() -> None:
    """Weights of a layer: q 16, k 8, v 8, o 16, mlp 3 * 32 = 144 in all; head 40; pairs of 3 and 1 tokens: 6 and 1."""
    assert forward_flops(HAND, [3, 1]) == 2 * (2 * 144 + 40) * 4 + 4 * 2 * 4 * 7
    assert forward_flops(HAND, [3, 1], head=False) == 2 * (2 * 144) * 4 + 4 * 2 * 4 * 7
    assert training_flops(HAND, [3, 1]) == 3 * forward_flops(HAND, [3, 1])
    assert forward_flops(HAND, []) == 0


def test_a_backward_pass_costs_twice_a_forward_pass() -> None:
    """By torch's counter; the embedding is a look-up without FLOPs."""
    config = tiny_config()
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    forward = counted(model, config.vocab_size, 24)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, config.vocab_size, (1, 24)), use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() == 3 * forward
    for weight in model.parameters():
        weight.requires_grad_(False)
    hidden = torch.randn(1, 24, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=hidden, use_cache=False).logits.sum().backward()
    expected = training_flops(config.to_dict(), [24], frozen=True) + 3 * masked_pairs(config.to_dict(), 24)
    assert counter.get_total_flops() == expected, "frozen weights"
