"""Loads quantised directories in vLLM; test_quantize runs it: `quantize_vllm.py DENSE MOE OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPTS = [[first, 9, *range(2, first)] for first in range(3, 19)]


def parsed(directory: str) -> dict[str, object]:
    """The quantisation that vLLM detects in a directory, and the layers it excludes."""
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    config = ModelConfig(directory)
    method = ModelOptFp8Config.from_config(config.hf_config.quantization_config)
    names = ("lm_head", "self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate", "mlp.experts")
    prefixes = [name if name == "lm_head" else f"model.layers.1.{name}" for name in names]
    excluded = [name for name, prefix in zip(names, prefixes, strict=True) if method.is_layer_excluded(prefix)]
    return {"quantization": config.quantization, "algorithm": method.quant_method, "excluded": excluded}


def answered(directory: str) -> list[dict[str, list[float]]]:
    """Greedy responses with the log-probs of their tokens."""
    from vllm import LLM, SamplingParams, TokensPrompt

    limits = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 2**26}
    engine = LLM(directory, dtype="float16", enforce_eager=True, **limits)
    settings = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS], settings)
    completions = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(completion.token_ids),
            "logprobs": [
                step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ],
        }
        for completion in completions
    ]


if __name__ == "__main__":
    dense, moe, out = sys.argv[1:]
    found = {"dense": parsed(dense), "moe": parsed(moe), "answers": answered(dense)}
    Path(out).write_text(json.dumps(found))
