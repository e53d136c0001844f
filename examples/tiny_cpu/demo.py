"""Run the whole demo: prepare, train, check the export, report. Each part is a process.

    python examples/tiny_cpu/demo.py [--out run/tiny_cpu] [section.key=value ...]

Ends with the status of the first part that fails. On success, the last line is
`demo: accuracy A -> B in S steps, T s`: held-out accuracy sampled at temperature 1, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_OUT = ROOT / "run" / "tiny_cpu"
ACCURACY = "eval/heldout/mean_at_k"
LEAST_LIFT = 0.30  # smallest gain in accuracy without overrides; less means that something is broken
EXIT_USER = 2


def main() -> int:
    """The exit status of the first part that failed, or 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory for data, model and run")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="trainer ranks")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of config.toml")
    options = parser.parse_args()
    options.out = options.out.resolve()
    os.chdir(ROOT)  # the config's paths are relative to the repository

    start = time.perf_counter()
    if problem := clear_run(options.out / "demo"):
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    for name, command in parts(options.out, options.nproc_per_node, options.overrides):
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status:
            print(f"error: demo stopped: {name} ended with status {status}", file=sys.stderr)
            return status if status > 0 else 128 - status  # a negative status is the signal that killed the part
    line, lift = summary(options.out / "demo", time.perf_counter() - start)
    print(line, flush=True)
    if lift < LEAST_LIFT and not options.overrides:
        print(f"error: the accuracy rose by less than {LEAST_LIFT:.0%}", file=sys.stderr)
        return 1
    return 0


def parts(out: Path, ranks: int, overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, command) of each part, in order."""
    config, run_dir = "examples/tiny_cpu/config.toml", str(out / "demo")
    command = [sys.executable, "-m", "oblr_megatron.cli"]
    return [
        ("prepare", [sys.executable, "examples/tiny_cpu/prepare.py", "--out", str(out)]),
        ("train", [*command, "train", config, *located(out), *overrides, "--nproc-per-node", str(ranks)]),
        ("check export", [sys.executable, "examples/tiny_cpu/check_export.py", run_dir]),
        ("report", [*command, "report", run_dir]),
    ]


def located(out: Path) -> list[str]:
    """Overrides that point config.toml at the demo's directories. Nothing is written to the config's own run_dir."""
    return [
        f"run_dir={out / 'demo'}",
        f"model.path={out / 'model'}",
        f"data.train={out / 'train.jsonl'}",
        f"evaluate.data.heldout={out / 'heldout.jsonl'}",
    ]


def clear_run(run_dir: Path) -> str | None:
    """Remove an earlier run of the demo. If the directory holds something else, keep it and return an error text."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return None
    try:
        model = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):  # not a run directory
        model = None
    if model is None or Path(model).resolve() != (run_dir.parent / "model").resolve():
        return f"not an earlier run of this demo [{run_dir}]. Fix: give another --out, or remove it"
    shutil.rmtree(run_dir)
    return None


def summary(run_dir: Path, seconds: float) -> tuple[str, float]:
    """(the demo's last line, gain in accuracy)."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    steps = records[-1]["step"]
    line = f"demo: accuracy {accuracies[0]:.1%} -> {accuracies[-1]:.1%} in {steps} steps, {seconds:.0f} s"
    return line, accuracies[-1] - accuracies[0]


if __name__ == "__main__":
    sys.exit(main())
