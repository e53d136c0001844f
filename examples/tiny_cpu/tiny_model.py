"""Build a small Qwen3 of the real architecture, dense or a mixture of experts, and a character-level tokenizer.

The model has grouped-query attention with 4 heads and 2 KV heads, and an even number of layers. Tensor parallelism 2
and pipeline parallelism 2 therefore divide it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # studies/ is not installed
from studies.start import character_tokenizer

EOS = "<eos>"
CHARACTERS = "0123456789+="
MAX_LENGTH = 64
EXPERTS_PER_TOKEN = 2


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character. It adds no token at the start or the end."""
    return character_tokenizer(CHARACTERS)


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, seed: int, experts: int = 0
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """A randomly initialised Qwen3 in fp32, untied like the large Qwen3 models.

    With experts, every layer is a mixture with as many active weights per token as the dense model.
    """
    torch.manual_seed(seed)
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 2 * hidden // EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,  # as in the published models
    }
    kind, own = (Qwen3MoeConfig, mixture) if experts else (Qwen3Config, {})
    config = kind(
        **own,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # with an id, transformers keeps that embedding at 0, where RMSNorm's gradient is huge
        dtype="float32",
    )
    model = (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
