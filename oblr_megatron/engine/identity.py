"""What a trainer and a server compare of the models that they started from, read from a Hugging Face directory.

    own = ModelIdentity.of(Path("models/q"))
    own.traits["stop_tokens"]            # [151643, 151645]

Equal shapes are not enough: siblings of one architecture rotate by another base, or stop at other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblr_megatron.checkpoint.hf_description import forward_traits
from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir, checkpoint_shapes
from oblr_megatron.engine.http_messages import shapes_digest


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
        traits = forward_traits(source.hf_config()) | {"stop_tokens": stop_tokens(source)}
        return cls(shapes_digest(checkpoint_shapes(path)), traits, source.fingerprint)


def stop_tokens(source: HFDir) -> list[int]:
    """Tokens at which vLLM ends a response: the tokenizer's, and those of generation_config.json or of config.json."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source.path)
    except OSError:  # as in vLLM 0.32 (`try_get_generation_config`)
        generation = GenerationConfig.from_model_config(source.hf_config())
    named = generation.eos_token_id
    several = named if isinstance(named, list) else [named]
    return sorted({one for one in (source.tokenizer().eos_token_id, *several) if one is not None})
