"""Measure the output layer in blocks: memory against the number of tokens, and the cost of fp32 logits.

    python tools/bench/lm_head.py memory                            # half a minute on one core
    python tools/bench/lm_head.py cost models/SmolLM2 --samples 8   # a gradient pass with each dtype of the logits

`memory` counts the live bytes of forward and backward at a width of 16, in which the logits are nearly everything.
`cost` alternates the two dtypes and prints medians of the processor's time. Its weights are random.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import publish
from shapes import randomize
from torch import nn
from transformers import AutoConfig

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.gradient.loss_fn import score_loss
from oblr_megatron.memory.buffer_sizes import BLOCK_LOGITS, KEPT_LOGITS
from oblr_megatron.model.lm_head import LMHead
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.model.taps import Tap
from oblr_megatron.types import TokenBatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from live_bytes import LiveBytes

HIDDEN, VOCAB = 16, 2**14
DTYPES = {"model": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Peak:
    """Example: Peak(tokens=32768, peak_bytes=329_351_176, whole_logits_bytes=2_147_483_648)"""

    tokens: int
    peak_bytes: int
    whole_logits_bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Example: Cost(head_dtype="float32", cpu_s=3.1, ratio=1.2)"""

    head_dtype: str
    cpu_s: float
    ratio: float  # to "model"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    kinds = parser.add_subparsers(dest="kind", required=True)
    memory = kinds.add_parser("memory")
    memory.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    cost = kinds.add_parser("cost")
    cost.add_argument("model", type=Path, help="a directory with a config.json")
    cost.add_argument("--samples", type=int, default=8)
    cost.add_argument("--prompt-tokens", type=int, default=50)
    cost.add_argument("--response-tokens", type=int, default=100)
    cost.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    parallel = initialize(ParallelConfig())
    try:
        if options.kind == "memory":
            publish([peak(n, parallel) for n in options.tokens], "the output layer's memory", options.json)
        else:
            publish(costs(options, parallel), "a gradient pass in bf16", options.json)
    finally:
        shutdown()


def peak(tokens: int, parallel: Parallel) -> Peak:
    """Live bytes at the fullest moment of forward and backward in fp32."""
    weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, device=parallel.device))
    head = LMHead(weight, VOCAB, parallel, Tap(), torch.float32, BLOCK_LOGITS[weight.is_cuda], KEPT_LOGITS[False])
    batch, live = random_batch(1, tokens, 0, VOCAB, parallel), LiveBytes()
    hidden = torch.randn(1, tokens, HIDDEN, device=parallel.device, requires_grad=True)
    with live:
        head(hidden, batch, entropy=True).logprobs.sum().backward()
    return Peak(tokens, live.peak, 4 * tokens * VOCAB)


def costs(options: argparse.Namespace, parallel: Parallel) -> list[Cost]:
    """Processor seconds of a gradient pass with each dtype of the logits."""
    hf_config = AutoConfig.from_pretrained(options.model)
    config = ModelConfig.model_validate({"path": options.model, "dtype": "bfloat16"})
    policy = build_policy(hf_config, config, parallel)
    randomize(policy.named_parameters())
    lengths = options.prompt_tokens + options.response_tokens, options.prompt_tokens
    batch = random_batch(options.samples, *lengths, policy.vocab_size, parallel)
    loss, seconds = score_loss(policy, 1.0, None), {name: list[float]() for name in DTYPES}
    for turn in range(options.rounds + 1):  # the first one warms up
        for name, dtype in DTYPES.items():
            policy.head.dtype = dtype
            policy.zero_grad()
            begin = time.process_time()
            run_schedule(policy, [batch], loss)
            seconds[name] += [time.process_time() - begin] * (turn > 0)
    plain = median(seconds["model"])
    return [Cost(name, median(own), median(own) / plain) for name, own in seconds.items()]


def random_batch(rows: int, tokens: int, prompt: int, vocab: int, parallel: Parallel) -> Any:
    """Samples of random tokens, which count after the prompt."""
    ids = torch.randint(vocab, (rows, tokens), device=parallel.device)
    mask = torch.arange(tokens, device=parallel.device).expand(rows, -1) >= prompt
    return TokenBatch(ids, ids.roll(-1, 1), mask, sample_index=torch.arange(rows))


if __name__ == "__main__":
    main()
