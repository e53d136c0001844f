"""The bare `vllm.LLM` of `rollout.py`: `python rollout_bare.py WORK.json LIKE` samples one batch per line of input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm
from rollout import SEED, TEMPERATURE, Work

from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.engine.samples import sampling_params


def main(work_file: str, like: str) -> None:
    """Print "ready", then {"tokens":, "seconds":} after every batch.

    Args:
        work_file: a `Work` as JSON.
        like: "stock" samples as in vLLM's quickstart; "ours" uses a run's options and sampling parameters.
    """
    work = Work(**json.loads(Path(work_file).read_text(encoding="utf-8")))
    llm = vllm.LLM(
        model=work.model,
        dtype=work.dtype,
        max_model_len=work.max_model_len,
        max_num_seqs=work.max_num_seqs,
        kv_cache_memory_bytes=work.kv_cache_bytes,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in work.prompts]
    parameters = [_parameters(work, like, position) for position in range(len(prompts))]
    print("\nready", flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        print("\n" + json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


def _parameters(work: Work, like: str, position: int) -> Any:
    if like == "ours":
        request = SamplingRequest(work.group_size, TEMPERATURE, work.max_tokens, SEED)
        return sampling_params(request, position, vocab_size=0)  # it matters where tokens are recorded
    return vllm.SamplingParams(n=work.group_size, temperature=TEMPERATURE, max_tokens=work.max_tokens, logprobs=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
