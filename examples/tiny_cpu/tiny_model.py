"""A Qwen3 of the real architecture, small enough for a laptop, and a character-level tokenizer of its own.

Grouped-query attention with 4 heads on 2 KV heads and an even number of layers, so that tensor parallelism 2 and
pipeline parallelism 2 divide it.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="
VOCABULARY = [PAD, EOS, UNKNOWN, *CHARACTERS]
MAX_LENGTH = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no token is added at the start or the end."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding would put a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3, fp32, untied like the large members of the family."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
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
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
