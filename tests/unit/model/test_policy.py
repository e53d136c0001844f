"""The Megatron model built from a Hugging Face config has exactly the parameters of the name table, at real sizes too.

Not covered: what it computes (tests/distributed), Transformer Engine's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model import cpu
from oblr_megatron.model.cpu.attention import RMSNorm
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_model
from oblr_megatron.model.published import published
from oblr_megatron.model.transformer_config import hf_config_of, transformer_config_of
from oblr_megatron.padding import padded_vocab_size
from oblr_megatron.weights.names import ModelShape, entry, table
from tests.tiny import LLAMA3_ROPE, tiny_config, tiny_config_of, tiny_moe_config
from tests.unit.weights.test_names import SIZES


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield initialize(ParallelConfig())
    shutdown()
    cpu.uninstall()


def shapes_on_meta(
    config: PreTrainedConfig, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Size]:
    """Parameter shapes of the model, built on the meta device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    model_config = ModelConfig.model_validate({"path": "none", "dtype": "bfloat16"})
    padded = padded_vocab_size(config.vocab_size, model_config.make_vocab_size_divisible_by, parallel.tp_size)
    model = build_model(config, transformer_config_of(config, model_config, parallel), model_config, parallel, padded)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", SIZES)
def test_real_sizes_have_the_tables_parameters(size: str, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_config_of(published(size))
    shapes = shapes_on_meta(config, parallel, monkeypatch)
    shape = ModelShape.of(config)
    assert shapes.keys() == {item.megatron for item in table(shape)}
    for name, actual in shapes.items():
        expected = entry(name, shape).shapes
        assert actual.numel() == sum(torch.Size(part).numel() for part in expected), name
        assert actual[-1] == expected[0][-1], name


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("width", [12, 64, 128])
def test_megatrons_scaled_frequencies_are_transformers_own(factor: float, width: int, parallel: Parallel) -> None:
    """Of Llama 3.1 and 3.2, bit for bit."""
    sizes = {"head_dim": width, "rope_parameters": LLAMA3_ROPE | {"factor": factor, "rope_theta": 500_000.0}}
    config = tiny_config_of("llama", **sizes)
    model_config = ModelConfig.model_validate({"path": "none"})
    model = build_model(config, transformer_config_of(config, model_config, parallel), model_config, parallel, 128)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(model.rotary_pos_emb.inv_freq, theirs)
    plain = 500_000.0 ** -(torch.arange(0, width, 2) / width)
    assert len({round(float(ratio), 3) for ratio in theirs / plain}) >= 3, "kept, blended and divided ones"


def test_a_mixture_has_the_tables_parameters(parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with the 128 experts of Qwen3-30B-A3B."""
    config = tiny_moe_config(
        vocab_size=128, hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    shapes = shapes_on_meta(config, parallel, monkeypatch)
    items = {item.megatron: item for item in table(ModelShape.of(config))}
    assert shapes.keys() == items.keys()
    for name, actual in shapes.items():
        assert actual.numel() == sum(torch.Size(part).numel() for part in items[name].shapes), name


def test_the_transformer_config_has_every_size(parallel: Parallel) -> None:
    config = tiny_config(rms_norm_eps=1e-5)
    result = transformer_config_of(
        config, ModelConfig.model_validate({"path": "none", "dtype": "float64"}), replace(parallel, tp_size=2)
    )
    assert (result.num_layers, result.hidden_size, result.ffn_hidden_size) == (2, 48, 56)
    assert (result.num_attention_heads, result.num_query_groups, result.kv_channels) == (4, 2, 16)
    assert result.layernorm_epsilon == 1e-5
    assert result.params_dtype == result.pipeline_dtype == torch.float64
    assert not result.bf16
    assert result.calculate_per_token_loss
    assert result.tensor_model_parallel_size == 2
    assert result.attention_dropout == result.hidden_dropout == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype, parallel: Parallel) -> None:
    config = transformer_config_of(
        tiny_config(), ModelConfig.model_validate({"path": "none", "dtype": str(dtype).split(".")[1]}), parallel
    )
    norm, stock = RMSNorm(config, 48, eps=1e-6), Qwen3RMSNorm(48, eps=1e-6).to(dtype)
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(48, generator=generator), 3 * torch.randn(5, 48, generator=generator)
    with torch.no_grad():
        norm.weight.copy_(weight)
        stock.weight.copy_(weight)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]  # the stock norm is fp32
    torch.testing.assert_close(norm(hidden.to(dtype)), stock(hidden.to(dtype)), rtol=tolerance, atol=tolerance)


def test_norm_is_marked_for_the_reduction_of_sequence_parallel(parallel: Parallel) -> None:
    model_config = ModelConfig.model_validate({"path": "none"})
    for sequence_parallel in (False, True):
        layout = replace(parallel, tp_size=2, sequence_parallel=sequence_parallel)
        norm = RMSNorm(transformer_config_of(tiny_config(), model_config, layout), 48)
        assert norm.weight.sequence_parallel is sequence_parallel
