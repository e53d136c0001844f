"""What exact per-sample gradient norms cost: a plain RLOO step against one with the norm pass, on Qwen3's layer shapes.

    python tools/bench/gradnorm.py --json run/bench/gradnorm.json

Both steps take the same samples through the same model in one process, in turn; the table gives the median of the
ratios of neighbouring steps, which a slow drift of the machine leaves alone. `extra_bytes` is the growth of the peak of
resident memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config

from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient import measure_norms, policy_gradient
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.qwen3 import Policy, build_policy
from oblr_megatron.types import Sample

SHAPES = {  # hidden, ffn, heads, kv heads; the vocabulary is cut, so that the layers and not the head are measured
    "tiny": (128, 256, 4, 2),
    "qwen3-0.6b": (1024, 3072, 16, 8),
    "qwen3-8b": (4096, 12288, 32, 8),
}
VOCAB, PROMPT_TOKENS = 2048, 16


def main() -> None:
    """Measure the shapes and lengths asked for, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--shapes", nargs="+", default=["tiny", "qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512], help="response tokens T")
    parser.add_argument("--samples", type=int, default=4, help="responses a step")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="pairs of steps, after one that is not counted")
    options = parser.parse_args()
    rows = [
        row
        for shape in options.shapes
        for tokens in options.tokens
        for row in measure(shape, tokens, options.samples, options.layers, options.steps)
    ]
    show(rows)
    if options.json:
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        record = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(shape: str, tokens: int, num_samples: int, layers: int, steps: int) -> list[dict[str, object]]:
    """Two rows, plain and two_pass, for one layer shape and response length."""
    config = bench_config(num_samples)
    parallel = initialize(config.parallel)
    policy = random_policy(shape, layers, tokens + PROMPT_TOKENS, config, parallel)
    optimizer = PolicyOptimizer(policy, config.optimizer)
    samples = random_samples(num_samples, tokens)
    coefficients = torch.linspace(-1, 1, num_samples, dtype=torch.float64)

    def plain() -> None:
        stats = policy_gradient(policy, samples, coefficients, config)
        optimizer.clip(stats.sq_norm)
        optimizer.step(1e-6)

    def two_pass() -> None:
        measure_norms(policy, samples, torch.ones(config.num_prompts, dtype=torch.bool), config)
        plain()

    plain()
    before = peak_bytes()
    two_pass()
    extra = peak_bytes() - before
    pairs = [(seconds(plain), seconds(two_pass)) for _ in range(steps)]
    shutdown()
    common: dict[str, object] = {"shape": shape, "layers": layers, "tokens": tokens, "samples": num_samples}
    base = statistics.median(first for first, _ in pairs)
    ratio = statistics.median(second / first for first, second in pairs)
    return [
        {"mode": "plain", **common, "seconds": base, "ratio_to_plain": 1.0, "extra_bytes": 0},
        {"mode": "two_pass", **common, "seconds": base * ratio, "ratio_to_plain": ratio, "extra_bytes": extra},
    ]


def bench_config(num_samples: int) -> Config:
    """One fold, one rank; every sample in a microbatch of its own in both passes, as at a cluster's token budgets."""
    table = {
        "run_dir": "unused",
        "num_prompts": 1,
        "group_size": num_samples,
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "algo": {"baseline": "rloo", "snr": {"num_folds": 1}},
        "rollout": {"correction": "none"},
        "parallel": {"micro_batch_tokens": 1},
    }
    return parse_config(table)


def random_policy(shape: str, layers: int, positions: int, config: Config, parallel: Parallel) -> Policy:
    """A policy of the shape, random weights."""
    hidden, ffn, heads, kv_heads = SHAPES[shape]
    hf_config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32 if shape == "tiny" else 128,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    policy = build_policy(hf_config, config.model, parallel)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.fill_(1.0) if "layernorm" in name else parameter.normal_(std=0.02)
    return policy


def random_samples(count: int, tokens: int) -> list[Sample]:
    """Responses of exactly `tokens` random tokens."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randint(VOCAB, (count, PROMPT_TOKENS + tokens), generator=generator).tolist()
    return [
        Sample(0, tuple(row[:PROMPT_TOKENS]), tuple(row[PROMPT_TOKENS:]), (-1.0,) * tokens, "", "length", 0)
        for row in draws
    ]


def seconds(step: Callable[[], None]) -> float:
    """Wall-clock time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(rows: list[dict[str, object]]) -> None:
    """The table, on the terminal."""
    table = Table(*rows[0], title="per-sample gradient norms: cost of a step")
    for row in rows:
        table.add_row(*(cell(value) for value in row.values()))
    Console().print(table)


def cell(value: object) -> str:
    """Three digits of a ratio, thousands of a count."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
