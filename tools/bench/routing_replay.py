"""Measure what `model.moe_routing_replay` changes: whole runs of real megatron-core and vLLM on a tiny mixture.

    python tools/bench/routing_replay.py --json run/bench/routing_replay.json      4 minutes

The trainer computes in float32. An engine in bfloat16 rounds the pushed weights, so some tokens take other experts. The
learning rate is so small that no weight changes: all runs with one dtype draw the same samples, which the file checks.
Seconds are of the fastest step after the first, because other programs make single steps slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from overlap import train, write_prompts
from record import publish

from tests.tiny import make_moe_hf_dir

EXPERTS, CHOSEN, LAYERS = 8, 2, 4


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one run.

    Example: Row(engine="bfloat16", replay=True, logprob_abs_diff=2.1e-3, flipped=0.012, rollout_s=1.3, gradient_s=2.0,
                 step_s=3.6, bytes_a_token=16.0, file_bytes_a_token=6.2)
    """

    engine: str  # dtype
    replay: bool
    logprob_abs_diff: float  # mean over response tokens and steps, nats
    flipped: float | None  # share of the trainer's own choices that differ from the engine's; only with replay
    rollout_s: float
    gradient_s: float
    step_s: float
    bytes_a_token: float  # of routes in memory
    file_bytes_a_token: float  # in the saved samples


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_moe_hf_dir(
            directory / "model",
            hidden_size=128,
            moe_intermediate_size=64,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            num_hidden_layers=LAYERS,
            head_dim=32,
            max_position_embeddings=1024,
        )
        write_prompts(directory / "train.jsonl", options.prompts * options.steps)
        for dtype in ("float32", "bfloat16"):
            drawn = [run(directory, dtype, replay, options) for replay in (False, True)]
            assert responses(drawn[0]) == responses(drawn[1]), "replay changes no draw"
            rows += [row_of(dtype, replay, path) for replay, path in zip((False, True), drawn, strict=True)]
    publish(rows, "routing replay", options.json)


def run(directory: Path, dtype: str, replay: bool, options: argparse.Namespace) -> Path:
    """A whole run; returns its directory."""
    run_dir = directory / f"{dtype}-{replay}"
    values = {
        "model.path": directory / "model",
        "model.moe_routing_replay": str(replay).lower(),
        "rollout.dtype": dtype,
        "rollout.save": "true",
        "reward.name": "routing_replay:odd_length",
        "algo.baseline": "rloo",
        "algo.schedule": "constant",
        "optimizer.lr": 1e-30,
        "gradnorm.mode": "two_pass",
    }
    train(run_dir, values, options)
    return run_dir


def odd_length(response: str, answer: str, prompt: str) -> float:
    """A reward that differs within groups of an untrained model, so that every step has a gradient."""
    return float(len(response) % 2)


def responses(run_dir: Path) -> list[list[int]]:
    """The token ids of all saved responses."""
    return [ids for path in files_of(run_dir) for ids in pq.read_table(path)["response_ids"].to_pylist()]


def files_of(run_dir: Path) -> list[Path]:
    """The saved steps."""
    return sorted((run_dir / "rollouts").glob("step_*.parquet"))


def row_of(dtype: str, replay: bool, run_dir: Path) -> Row:
    """The table's row of a run."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "rollout/logprob_abs_diff" in step]
    tokens = held = stored = 0
    for path in files_of(run_dir):
        table, parts = pq.read_table(path), pq.ParquetFile(path).metadata
        ids = (table["prompt_ids"], table["response_ids"])
        tokens += sum(len(one) for column in ids for one in column.to_pylist())
        held += sum(len(one or b"") for one in table["routes"].to_pylist())
        columns = [parts.row_group(0).column(number) for number in range(parts.num_columns)]
        stored += next(column.total_compressed_size for column in columns if column.path_in_schema == "routes")

    def fastest(name: str) -> float:
        return min(step[name] for step in steps[1:])

    names = "timing_s/rollout", "timing_s/gradient", "timing_s/step"
    flipped = statistics.mean(step["moe/route_mismatch_fraction"] for step in steps) if replay else None
    cost = (*map(fastest, names), held / tokens, stored / tokens if held else 0.0)
    difference = statistics.mean(step["rollout/logprob_abs_diff"] for step in steps)
    return Row(dtype, replay, difference, flipped, *cost)


if __name__ == "__main__":
    main()
