"""Measure what `rollout.overlap` is worth: whole runs of real megatron-core and vLLM, each with one thread.

    python tools/bench/overlap.py --rounds 3 --json run/bench/overlap.json      6 minutes

The lengths have a long tail: a model with random weights ends a response with the same small chance after every token.
In each round every mode makes a whole run with the same first samples. A row has the median step of all rounds; the
first WARM steps of a run do not count. `ratio` is the median over rounds of (the mode's step / the step of "none").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from record import publish

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.tiny import VOCAB, make_hf_dir  # noqa: E402

MODES = ("none", "stream", "one_step")
WARM = 2  # the first step of a pooled baseline is whole, and the second one meets cold caches
LIMIT_S = 1800  # of a run


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one mode.

    Example: Row(mode="stream", step_s=4.1, rollout_s=2.9, gradient_s=2.0, waves=9.0, mean_length=37.0, ratio=0.66)
    """

    mode: str
    step_s: float
    rollout_s: float  # that the trainer waits for samples
    gradient_s: float
    waves: float
    mean_length: float  # of the responses, tokens
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_hf_dir(
            directory / "model",
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            head_dim=32,
            max_position_embeddings=1024,
        )
        write_prompts(directory / "train.jsonl", options.prompts * (options.steps + 1))
        steps: dict[str, list[list[dict[str, float]]]] = {mode: [] for mode in MODES}
        for number in range(options.rounds):
            for mode in MODES:
                steps[mode].append(run(directory, model, mode, number, options))
    publish(rows_of(steps), "overlap", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=4, help="responses per prompt")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--wave-tokens", type=int, help="rollout.wave_tokens (default: the package's)")
    parser.add_argument("--packing", choices=("rows", "packed"), default="rows")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


def write_prompts(path: Path, count: int) -> None:
    """Prompts of three tokens."""
    rows = [{"question": f"t{2 + n % 30} t{2 + n // 30 % 30} t{3 + n % 7}", "answer": "t5"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(directory: Path, model: Path, mode: str, number: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The counted steps of a whole run, with one thread for the trainer and one for the engine."""
    run_dir = directory / f"{mode}-{number}"
    values = {
        "model.path": model,
        "rollout.max_num_seqs": options.prompts * options.group,
        "rollout.overlap": mode,
        "rollout.max_staleness": int(mode == "one_step"),
        "reward.name": "exact_match",
        "algo.baseline": "pooled",
        "gradnorm.mode": "inline",
        "parallel.packing": options.packing,
    }
    if options.wave_tokens:
        values["rollout.wave_tokens"] = options.wave_tokens
    return train(run_dir, values, options)[WARM:]


def train(run_dir: Path, values: Mapping[str, object], options: argparse.Namespace) -> list[dict[str, float]]:
    """All steps of a whole run on one rank, without evaluation and checkpoints.

    Args:
        run_dir: lies next to train.jsonl.
        values: of further config keys.
        options: prompts, group, max_tokens and steps are read.
    """
    usual = {
        "run_dir": run_dir,
        "num_steps": options.steps,
        "num_prompts": options.prompts,
        "group_size": options.group,
        "data.train": run_dir.parent / "train.jsonl",
        "data.template": "{question}",
        "data.max_prompt_tokens": 8,
        "rollout.max_response_tokens": options.max_tokens,
        "rollout.num_threads": 1,
        "algo.snr.num_folds": 1,
        "parallel.micro_batch_tokens": 512,
        "evaluate.every_steps": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.export_hf": "false",
        "log.trackers": "[]",
    }
    config = run_dir.parent / "config.toml"
    config.write_text("", encoding="utf-8")
    words = [f"{key}={value}" for key, value in {**usual, **values}.items()]
    command = [sys.executable, "-m", "oblr_megatron.step_loop", str(config), *words]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | alone | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))  # rewards of the benchmarks
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def rows_of(found: dict[str, list[list[dict[str, float]]]]) -> list[Row]:
    """One row for each mode; medians over the steps of all rounds, and of the rounds' ratios."""

    def median(mode: str, name: str) -> float:
        return statistics.median(step.get(name, 1.0) for steps in found[mode] for step in steps)

    def typical(steps: list[dict[str, float]]) -> float:
        return statistics.median(step["timing_s/step"] for step in steps)

    rows = []
    for mode, rounds in found.items():
        ratios = [typical(own) / typical(base) for own, base in zip(rounds, found[MODES[0]], strict=True)]
        names = "timing_s/step", "timing_s/rollout", "timing_s/gradient", "rollout/waves", "response_length/mean"
        figures = [*(median(mode, name) for name in names), statistics.median(ratios)]
        rows.append(Row(mode, *figures))
    return rows


if __name__ == "__main__":
    assert VOCAB == 37, "the chance of the end of a response"
    main()
