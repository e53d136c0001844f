"""What a trainer and a server compare of the models that they started from, read from a Hugging Face directory.

    own = ModelIdentity.of(Path("models/q"))
    own.traits["stop_tokens"]            # [151643, 151645]

Equal shapes are not enough: siblings of one architecture rotate by another base, or stop at other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir, checkpoint_shapes
from oblr_megatron.engine.http_messages import shapes_digest
from oblr_megatron.families import LLAMA3_ROPE

FIELDS = (
    *("model_type", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "use_sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "norm_topk_prob"),
)
"""Of transformers' configuration: what a forward pass reads, and names and shapes of tensors do not imply."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Example: ModelIdentity(shapes="5be1...", traits={"rope_theta": 1e6, "stop_tokens": [1]}, fingerprint="a2...")"""

    shapes: str  # `shapes_digest`
    traits: dict[str, Any]  # what else decides the logits and the end of a response, as JSON has it
    fingerprint: str  # of the weights: `HFDir.fingerprint`

    @classmethod
    def of(cls, path: Path) -> ModelIdentity:
        """Read a directory; a `UserError` if it is not a complete checkpoint."""
        source = check_hf_dir(path)
        return cls(shapes_digest(checkpoint_shapes(path)), _traits(source), source.fingerprint)


def _traits(source: HFDir) -> dict[str, Any]:
    config = source.hf_config()
    rope: dict[str, Any] = config.rope_parameters
    kind = rope.get("rope_type", "default")
    read = ("rope_theta",) if kind == "default" else ("rope_theta", "factor", *LLAMA3_ROPE)
    traits = {name: getattr(config, name, None) for name in FIELDS}
    traits |= {"rope_type": kind} | {name: float(rope[name]) for name in read if name in rope}
    return traits | {"stop_tokens": _stop_tokens(source)}


def _stop_tokens(source: HFDir) -> list[int]:
    """Tokens at which vLLM ends a response: the tokenizer's, and those of generation_config.json or of config.json."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source.path)
    except OSError:  # as in vLLM 0.32 (`try_get_generation_config`)
        generation = GenerationConfig.from_model_config(source.hf_config())
    named = generation.eos_token_id
    several = named if isinstance(named, list) else [named]
    return sorted({one for one in (source.tokenizer().eos_token_id, *several) if one is not None})
