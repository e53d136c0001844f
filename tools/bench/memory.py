"""The memory that a step takes, against the estimate made before it: the peak of a fresh process for every case.

python tools/bench/memory.py --json run/bench/memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from meter import reset_resident_peak, resident_peak
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, randomize
from transformers import Qwen3Config

from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient import TrainingGradient
from oblr_megatron.gradnorm.memory import estimate, resident_bytes
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import initialize
from oblr_megatron.model.qwen3 import build_policy
from oblr_megatron.types import Sample

GROUP, PROMPT_TOKENS = 4, 16
CASES: list[dict[str, Any]] = [
    {"mode": "two_pass", "tokens": 512, "vocab": 2048},
    {"mode": "bookkeep", "tokens": 512, "vocab": 2048},
    {"mode": "stash", "tokens": 512, "vocab": 2048},
    {"mode": "two_pass", "tokens": 512, "vocab": 65536},
    {"mode": "bookkeep", "tokens": 512, "vocab": 65536},
    {"mode": "stash", "tokens": 512, "vocab": 65536},
    {"mode": "two_pass", "tokens": 1500, "vocab": 2048},
    {"mode": "bookkeep", "tokens": 1500, "vocab": 2048},
    {"mode": "stash", "tokens": 1500, "vocab": 2048},
]


def main() -> None:
    """Every case in a process of its own, the table, the figures; with --case, the one case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--case", help="measure this one in this process and print a JSON line")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return
    rows = [in_a_process(case) for case in CASES]
    table = Table(*rows[0], title="memory of a step: estimated and measured, bytes")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


def in_a_process(case: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a fresh process, whose allocator gives back what is freed: else the peak is that of its habits.

    glibc keeps freed blocks of up to 32 MB for later, which adds up to a third to a process on a CPU.
    """
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure(mode: str, tokens: int, vocab: int, shape: str = "qwen3-0.6b", layers: int = 2) -> dict[str, Any]:
    """Build, estimate, take two steps; the peak is that of the second, when the optimizer's state is there."""
    config, hf_config = config_of(mode, tokens), hf_config_of(shape, layers, tokens, vocab)
    parallel = initialize(config.parallel)
    found = estimate(hf_config.to_dict(), config, 1, fixed_bytes=resident_bytes())
    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    randomize(policy.named_parameters())
    optimizer, gradients = PolicyOptimizer(policy, config.optimizer), TrainingGradient(policy, config)
    samples, active = random_samples(tokens, vocab), torch.ones(config.num_prompts, dtype=torch.bool)
    coefficients = torch.linspace(-1, 1, len(samples), dtype=torch.float64).view(-1, GROUP)
    for _ in range(2):
        reset_resident_peak()
        step = gradients(samples, lambda prompts, _: coefficients[list(prompts)], active)
        optimizer.clip(step.stats.sq_norm)
        optimizer.step(1e-6)
    measured = resident_peak()
    case = {"mode": mode, "shape": shape, "layers": layers, "tokens": tokens, "vocabulary": vocab}
    ratio = found.total / measured
    return case | {"estimated": found.total, "measured": measured, "ratio": ratio, "moment": found.moment}


def config_of(mode: str, tokens: int) -> Config:
    """Two prompts of four responses in two folds, a sample a microbatch."""
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": 2,
            "group_size": GROUP,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
            "algo": {"baseline": "optimal", "snr": {"num_folds": 2}},
            "rollout": {"correction": "none", "max_response_tokens": tokens - PROMPT_TOKENS},
            "gradnorm": {"mode": mode},
            "parallel": {"micro_batch_tokens": 1},
        }
    )


def hf_config_of(shape: str, layers: int, tokens: int, vocab: int) -> Qwen3Config:
    """The model, its head tied as in the small Qwen3."""
    sizes = SHAPES[shape]
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def random_samples(tokens: int, vocab: int) -> list[Sample]:
    """Samples of exactly `tokens` tokens."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randint(vocab, (2 * GROUP, tokens), generator=generator).tolist()
    count = tokens - PROMPT_TOKENS
    return [
        Sample(n // GROUP, tuple(row[:PROMPT_TOKENS]), tuple(row[PROMPT_TOKENS:]), (-1.0,) * count, "", "length", 0)
        for n, row in enumerate(draws)
    ]


if __name__ == "__main__":
    main()
