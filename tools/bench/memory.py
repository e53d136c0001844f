"""Compare the estimated memory of a step with the measured peak, in fresh processes for every case.

    python tools/bench/memory.py --json run/bench/memory.json       a quarter of an hour on two cores
    python tools/bench/memory.py --cases "bookkeep tokens=256" "stash tp=2"
    python tools/bench/memory.py --allocator system                 includes freed memory that glibc keeps

Each case takes two steps of two layers with Qwen3-0.6B's sizes, in fp32, one sample per microbatch. `measured` is the
peak resident memory of the fullest rank, including imports. glibc keeps freed blocks of up to 32 MB and rarely reuses
them, so a CPU process takes up to a third more than its tensors. By default the ranks therefore set
MALLOC_MMAP_THRESHOLD_: freed memory returns to the system (which costs time), and the peak is that of the tensors.
On a GPU `measured` is the peak of torch's allocator, and `tp` times `pp` GPUs are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from meter import reset_resident_peak, resident_peak
from rich.console import Console
from rich.table import Table
from shapes import PROMPT_TOKENS, SHAPES, randomize
from transformers import Qwen3Config

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import Config, parse_config
from oblr_megatron.formatting import size
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.memory.training import estimate, resident_bytes
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.precision import uses_transformer_engine
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # blocks of 1 MiB or more are mapped, and unmapped when freed


@dataclass(frozen=True, slots=True)
class Case:
    """A step to measure. Example on the command line: "stash tokens=256 tp=2 sp=1"."""

    mode: str = "two_pass"
    shape: str = "qwen3-0.6b"
    layers: int = 2
    tokens: int = 512  # per sample, prompt and response
    vocabulary: int = 2048
    tied: int = 0
    samples: int = 4  # G
    prompts: int = 1  # Q, each a fold
    dtype: str = "float32"
    tp: int = 1
    sp: int = 0
    pp: int = 1
    layers_of: str = "auto"  # model.transformer_impl

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse a mode followed by name=value for fields that differ from the defaults."""
        mode, *words = text.split()
        given = dict(word.split("=", 1) for word in words)
        kinds = get_type_hints(cls)
        return replace(cls(mode), **{name: kinds[name](value) for name, value in given.items()})

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp

    def hf_config(self) -> Qwen3Config:
        """The model's config."""
        shape = SHAPES[self.shape]
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=self.tokens,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=bool(self.tied),
        )

    def config(self) -> Config:
        """The run's config."""
        return parse_config(
            {
                "run_dir": "unused",
                "num_prompts": self.prompts,
                "group_size": self.samples,
                "model": {"path": "unused", "dtype": self.dtype, "transformer_impl": self.layers_of},
                "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
                "algo": {
                    "baseline": "pooled" if self.mode == "inline" else "optimal",
                    "snr": {"num_folds": self.prompts},
                },
                "rollout": {"max_response_tokens": self.tokens - PROMPT_TOKENS},
                "gradnorm": {"mode": self.mode},
                "checkpoint": {"every_steps": 0},
                "parallel": {
                    "micro_batch_tokens": 1,
                    "tensor_model_parallel_size": self.tp,
                    "sequence_parallel": bool(self.sp),
                    "pipeline_model_parallel_size": self.pp,
                },
            }
        )

    def random_samples(self) -> list[Sample]:
        """Samples of exactly `tokens` tokens."""
        generator = torch.Generator().manual_seed(1)
        shape, response = (self.prompts * self.samples, self.tokens), self.tokens - PROMPT_TOKENS
        return [
            Sample(
                n // self.samples,
                tuple(ids[:PROMPT_TOKENS]),
                tuple(ids[PROMPT_TOKENS:]),
                (-1.0,) * response,
                "",
                "stop",
                0,
            )
            for n, ids in enumerate(torch.randint(self.vocabulary, shape, generator=generator).tolist())
        ]


CASES = [
    *(f"{mode} tokens=512" for mode in ("inline", "two_pass", "stash", "bookkeep")),
    *(f"{mode} tokens=1500 samples=2" for mode in ("two_pass", "stash", "bookkeep")),
    *(f"{mode} tokens=256 vocabulary=65536 tied=1" for mode in ("two_pass", "stash", "bookkeep")),
    "bookkeep tokens=256 dtype=bfloat16",
    "stash tokens=256 prompts=2 samples=2",
    "two_pass tp=2 sp=1",
    "bookkeep tp=2 sp=1",
    "bookkeep pp=2",
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case in its own processes, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--cases", nargs="+", default=CASES, help='a mode and name=value, e.g. "stash tokens=256 tp=2"')
    parser.add_argument("--allocator", default="trimmed", choices=("trimmed", "system"))
    parser.add_argument("--rank-of", metavar="CASE", help=argparse.SUPPRESS)  # internal: starts a rank
    options = parser.parse_args(arguments)
    if options.rank_of:
        measure(Case.parse(options.rank_of))
        return
    rows = [in_processes(text, GIVES_BACK if options.allocator == "trimmed" else {}) for text in options.cases]
    show(rows)
    if options.json:
        machine = f"{platform.machine()}, allocator {options.allocator}, torch {torch.__version__}"
        record = {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def in_processes(text: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run `measure` in fresh processes, one per rank; returns rank 0's row."""
    ranks = Case.parse(text).ranks
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--rank-of", text]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment)
    row: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return row


def measure(case: Case) -> None:
    """Estimate, build, take two steps (the first creates the optimizer's state); rank 0 prints the row."""
    config, hf_config = case.config(), case.hf_config()
    parallel = initialize(config.parallel)
    on_gpu = parallel.device.type == "cuda"
    found = estimate(
        hf_config.to_dict(),
        config,
        case.ranks,
        on_gpu=on_gpu,
        transformer_engine=uses_transformer_engine(config.model, parallel),
        fixed_bytes=0 if on_gpu else resident_bytes(),
    )
    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    randomize(policy.named_parameters())
    optimizer, gradient = PolicyOptimizer(policy, config.optimizer), StepGradient(policy, config)
    samples = case.random_samples()
    rewards = torch.linspace(-1, 1, len(samples), dtype=torch.float64).view(case.prompts, -1)
    lengths = torch.tensor([sample.length for sample in samples]).view_as(rewards)
    batch = whole_step(Batch([], samples, Scored(rewards, lengths, 0)))
    advantage = AdvantageRule(batch.scored, config)
    reset_peak(on_gpu)
    for _ in range(2):
        gradient.begin(1).add(batch, advantage)
        (stats,) = gradient.updates()
        optimizer.clip(stats.sq_norm)
        optimizer.step(1e-6)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else resident_peak(), device=parallel.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if parallel.rank == 0:
        metrics = {"estimated": found.total, "measured": int(peak), "ratio": found.total / int(peak)}
        print(json.dumps(asdict(case) | metrics | {"moment": found.moment, "parts": dict(found.rows())}), flush=True)
    shutdown()


def reset_peak(on_gpu: bool) -> None:
    """Forget the peak of what came before the steps."""
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per case: fields that differ from the defaults, both sizes, and the parts of the estimate."""
    table = Table("case", "estimated", "measured", "ratio", "at the", "made of", title="memory of a step, fullest rank")
    default = asdict(Case())
    for row in rows:
        differs = [f"{name}={row[name]}" for name in default if name != "mode" and row[name] != default[name]]
        parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in row["parts"].items() if num_bytes)
        metrics = [size(row["estimated"]), size(row["measured"]), f"{row['ratio']:.3f}"]
        table.add_row(" ".join([row["mode"], *differs]), *metrics, row["moment"], parts)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
