"""Tiny directories of every family made by transformers: the real architecture; all sizes are small and differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 37  # odd, so that every padding divisor leaves padding
DENSE: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
"""Dense families by model_type."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


LLAMA3_ROPE = {  # of eight frequencies six stay, one is blended and one is divided
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_config(**overrides: Any) -> Qwen3Config:
    """4 heads on 2 KV heads, head_dim 16 where hidden / heads is 12, 37 tokens."""
    return Qwen3Config(**SIZES | overrides)


def tiny_config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny configuration of a dense family by its model_type; Qwen2 cannot state head_dim, and has 48 / 4 = 12."""
    kind, _ = DENSE[family]
    scaled = {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384}
    overrides = (scaled if family == "llama" else {}) | overrides
    sizes = {name: value for name, value in SIZES.items() if family != "qwen2" or name != "head_dim"}
    return kind(**sizes | overrides)


def tiny_moe_config(**overrides: Any) -> Qwen3MoeConfig:
    """The same with 4 experts in each layer; each token uses 2."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
    return Qwen3MoeConfig(**SIZES | experts | overrides)


def make_hf_dir(
    path: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    family: str = "qwen3",
    **overrides: Any,
) -> Path:
    """Write config, generation config, tokenizer and weights; `max_shard_size="20KB"` gives several files and an index.

    Weights are larger than a fresh model's and norm weights differ from 1, so that small or neutral values hide no
    mistake.
    """
    state = torch.get_rng_state()
    model = DENSE[family][1](tiny_config_of(family, tie_word_embeddings=tied, **overrides))
    torch.set_rng_state(state)
    return _save(model.to(dtype), path, seed, max_shard_size)


def make_moe_hf_dir(
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """`make_hf_dir` of a mixture of experts; on disk each expert has its own tensors, as in published checkpoints."""
    state = torch.get_rng_state()
    model = Qwen3MoeForCausalLM(tiny_moe_config(**overrides))
    torch.set_rng_state(state)
    return _save(model.to(dtype), path, seed, max_shard_size)


def _save(model: PreTrainedModel, path: Path, seed: int, max_shard_size: str) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    make_tokenizer(model.config.vocab_size).save_pretrained(path)
    return path


def make_tokenizer(vocab_size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Whole words "t0" "t1" ... after <pad> and <eos>, split at blanks."""
    words = ["<pad>", "<eos>", *(f"t{index}" for index in range(2, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
