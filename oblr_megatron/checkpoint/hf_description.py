"""Reads a directory's configuration and tokenizer with transformers; each error is one line. Loads without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError
from oblr_megatron.families import LLAMA3_ROPE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

OWN_CONFIG = "use the config.json that came with the weights"
TRAITS = (
    *("model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "use_sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "norm_topk_prob"),
)
"""What a forward pass reads, and names and shapes of tensors do not imply, besides rope."""


def hf_config_in(path: Path) -> PreTrainedConfig:
    """The configuration as a transformers object.

    Raises:
        UserError: transformers does not accept it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each of transformers' checks has its own type
        raise UserError(
            f"transformers cannot read the configuration: {' '.join(str(error).split()):.300}",
            where=str(path / "config.json"),
            fix=OWN_CONFIG,
        ) from error


def forward_traits(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """What decides the logits besides the weights. Example: {"rms_norm_eps": 1e-6, ..., "rope_theta": 1e6}"""
    rope: dict[str, Any] = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    read = ("rope_theta",) if kind == "default" else ("rope_theta", "factor", *LLAMA3_ROPE)
    traits = {name: getattr(hf_config, name, None) for name in TRAITS}
    return traits | {"rope_type": kind} | {name: float(rope[name]) for name in read if name in rope}


def tokenizer_in(path: Path, rows: int) -> PreTrainedTokenizerBase:
    """The directory's tokenizer, for a model with `rows` rows in its embedding.

    Raises:
        UserError: its files or config.json are damaged, it has tokens without a row, or its class loses spaces.
    """
    from transformers import AutoTokenizer

    hf_config_in(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        loses_spaces = _loses_spaces(tokenizer, path)
    except Exception as error:  # damaged files raise many types, some of them from Rust
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"cannot read the tokenizer: {type(error).__name__}: {reason}",
            where=str(path),
            fix="download or export the tokenizer files again",
        ) from error
    beyond = min(((number, token) for token, number in vocabulary.items() if number >= rows), default=None)
    if beyond is not None:
        raise UserError(
            f"the tokenizer has {len(vocabulary)} tokens, but the model's vocab_size is {rows}: "
            f"token {beyond[1]!r} has id {beyond[0]}",
            where=str(path),
            fix="use the model's own tokenizer, or resize the model's embeddings (resize_token_embeddings)",
        )
    if loses_spaces:
        raise UserError(
            f"transformers reads this tokenizer as {type(tokenizer).__name__}, which loses spaces and line ends",
            where=str(path / "tokenizer_config.json"),
            fix='set "tokenizer_class" to "PreTrainedTokenizerFast" in it',
        )
    return tokenizer


def _loses_spaces(tokenizer: PreTrainedTokenizerBase, path: Path) -> bool:
    """Whether a byte-level tokenizer.json is read by a class of another kind.

    R1-Distill-Llama names LlamaTokenizerFast, for which transformers 5 builds the pre-tokenizer of Llama 2.
    """
    text, file = "a b\nc", path / "tokenizer.json"
    if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text or not file.is_file():
        return False
    return "ByteLevel" in json.dumps(json.loads(file.read_text(encoding="utf-8")).get("decoder"))
