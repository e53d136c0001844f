"""Run two full RL steps at the size of Qwen3-0.6B on this machine, and check that every phase worked.

    python tools/smoke.py [--out run/smoke] [--dtype float32] [--data FILE.jsonl] [section.key=value ...]

Makes a model with random weights (make_smoke_model.py), runs `tools/smoke.toml` on one rank, and checks metrics and
export. Questions come from GSM8K (--data, or data/gsm8k_train.jsonl in the repository or in a sibling directory
"shared"), else from tools/smoke_prompts.jsonl. The reward (smoke_reward.py) is meaningless: the run shows that sizes
fit and parts work together, not that anything learns. It needs some minutes and about 17 GiB of memory, in float32 and
in bfloat16. On failure it lists the problems and ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from make_smoke_model import SAMPLE_TEXTS, make_model

ROOT = Path(__file__).resolve().parents[1]
GSM8K = [place / "data" / "gsm8k_train.jsonl" for place in (ROOT, ROOT.parent / "shared")]
NUM_PROMPTS = 64
MODEL, RUN = "smoke_model", "smoke_run"  # both are replaced on every call
PHASES = ("rollout", "reward", "gradient", "optimizer", "push", "step")
POSITIVE = (*(f"timing_s/{phase}" for phase in PHASES), "gradnorm/sq_mean", "gradnorm/sq_max", "grad_norm", "entropy")
FINITE = (
    *POSITIVE,
    *("reward/mean", "reward/std", "response_length/mean", "response_length/truncated_fraction", "loss", "lr"),
    *("rollout/truncated_ratio_fraction", "baseline/variance_ratio_vs_rloo", "perf/tokens_per_s", "perf/samples_per_s"),
    *("snr/signal_sq", "snr/noise_trace", "snr/shrink_raw", "snr/shrink_ema"),
)
LARGEST_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.1}  # mean over tokens, nats; trainer against vLLM
POLL_S = 0.5
EXIT_USER = 2


def main() -> int:
    """The exit status: the run's own, or 1 if a check fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/smoke"), help="directory for model, prompts and run")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    parser.add_argument("--data", type=Path, help="GSM8K in JSONL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of smoke.toml")
    options = parser.parse_args()
    if options.data is not None and not options.data.is_file():
        print(f"error: no such file [--data {options.data}]. Fix: give GSM8K in JSONL, or omit it", file=sys.stderr)
        return EXIT_USER
    texts = next((path for path in [options.data, *GSM8K] if path is not None and path.is_file()), SAMPLE_TEXTS)
    out = options.out.resolve()
    prepare(out, texts, options.dtype)
    os.chdir(ROOT)  # the reward's name, tools.smoke_reward, is relative to the repository

    overrides = [
        f"run_dir={out / RUN}",
        f"model.path={out / MODEL}",
        f"data.train={out / 'prompts.jsonl'}",
        f"model.dtype={options.dtype}",
        *options.overrides,
    ]
    start = time.perf_counter()
    status, peak_bytes = run_watched([sys.executable, "-m", "oblr_megatron.step_loop", "tools/smoke.toml", *overrides])
    if status:
        print(f"error: the run ended with status {status}", file=sys.stderr)
        return status if status > 0 else 128 - status
    problems = check_run(out / RUN)
    show(out / RUN)
    print(f"peak memory of all processes {peak_bytes / 2**30:.1f} GiB, {time.perf_counter() - start:.0f} s")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"smoke: {'FAILED' if problems else 'ok'}")
    return 1 if problems else 0


def prepare(out: Path, texts: Path, dtype: str) -> None:
    """Make model and prompts; remove an earlier smoke run in the same place."""
    for name in (MODEL, RUN):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with texts.open(encoding="utf-8") as lines:
        chosen = [line for line, _ in zip(lines, range(NUM_PROMPTS), strict=False)]
    (out / "prompts.jsonl").write_text("".join(chosen), encoding="utf-8")
    count = make_model(out / MODEL, dtype=dtype, texts=texts, seed=0)
    print(f"model of {count:,} parameters ({dtype}) and {len(chosen)} prompts of {texts} in {out}", flush=True)


def run_watched(command: Sequence[str]) -> tuple[int, int]:
    """Run a command; returns (exit status, peak memory in bytes of the process and its descendants)."""
    peak = 0
    with subprocess.Popen(command) as job:
        while job.poll() is None:
            peak = max(peak, tree_bytes(job.pid))
            time.sleep(POLL_S)
    return job.returncode, peak


def tree_bytes(pid: int) -> int:
    """Resident memory of a process tree. Shared pages count once where the system reports PSS."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            memory = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # the process has ended or is a zombie
            continue
        total += getattr(memory, "pss", memory.rss)
    return total


def check_run(run_dir: Path) -> list[str]:
    """Problems of a finished run."""
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    records = [record for record in read_records(run_dir) if record["step"] > 0]
    steps = [record["step"] for record in records]
    problems = []
    if steps != list(range(1, config["num_steps"] + 1)):
        problems.append(f"metrics.jsonl holds steps {steps}, not 1 to {config['num_steps']}")
    largest = LARGEST_LOGPROB_DIFF[config["model"]["dtype"]]
    for record in records:
        problems += [f"step {record['step']}: {text}" for text in check_record(record, largest)]
    if not list((run_dir / "hf").glob("*.safetensors")):
        problems.append(f"no export in {run_dir / 'hf'}")
    return problems


def check_record(record: dict[str, Any], largest_diff: float) -> list[str]:
    """Problems of one step."""
    problems = [f"{name} is missing" for name in FINITE if name not in record]
    values = {name: record[name] for name in FINITE if name in record}
    problems += [f"{name} = {value} is not finite" for name, value in values.items() if not math.isfinite(value)]
    problems += [f"{name} = {values[name]} is not above 0" for name in POSITIVE if values.get(name, 1) <= 0]
    if record.get("gradnorm/nonfinite", 0):
        problems.append(f"{record['gradnorm/nonfinite']} norms were not finite")
    if not record.get("groups/mixed_fraction", 0) > 0:
        problems.append("no group has differing rewards")
    if record.get("weights/version") != record["step"]:
        problems.append(f"weights/version = {record.get('weights/version')}: a push was lost")
    if not record.get("rollout/logprob_abs_diff", math.inf) <= largest_diff:
        problems.append(f"trainer and vLLM differ by {record.get('rollout/logprob_abs_diff')} nats a token")
    return problems


def show(run_dir: Path) -> None:
    """Print the metrics of all steps, one metric per line."""
    names = [*FINITE, "rollout/logprob_abs_diff", "groups/mixed_fraction", "perf/peak_memory_bytes"]
    records = [record for record in read_records(run_dir) if record["step"] > 0]
    for name in names:
        print(f"{name:28}", *(f"{record.get(name, math.nan):14.6g}" for record in records))


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
