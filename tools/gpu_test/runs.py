"""Whole runs by replay: saved samples instead of engines, everything else as in training."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import multiprocessing

from oblr_megatron.config import load_config
from oblr_megatron.extras.planner.constants import PlannerMachine
from oblr_megatron.extras.planner.setting import Setting
from oblr_megatron.extras.planner.training_cost import training_phases
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import this_device
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.runtime.collectives import Collectives
from oblr_megatron.types import Prompt, Sample
from tests.tiny import make_hf_dir
from tools.gpu_test.norms import rows_of
from tools.gpu_test.raising import RAISED
from tools.gpu_test.report import ROOT, Report
from tools.make_smoke_model import SAMPLE_TEXTS, make_model

PROMPT_TOKENS = 16
TRAINING = ("gradnorm", "gradient", "optimizer")
MODES = {"plain": ["algo.baseline=rloo"], "inline": ["algo.baseline=pooled", "gradnorm.mode=inline"]} | {
    mode: ["algo.baseline=optimal", f"gradnorm.mode={mode}"] for mode in ("stash", "bookkeep", "two_pass")
}
POLL_S = 0.5


def prepare(
    directory: Path,
    *,
    tiny: bool,
    dtype: str,
    prompts: int,
    group: int,
    tokens: int,
    steps: int,
    more: Sequence[str] = (),
) -> list[str]:
    """Make a model and saved samples; returns the arguments of a run on them, but for its run_dir.

    The model is Qwen3-0.6B with random weights, or a tiny one. Responses are random tokens. The reward is the share of
    vowels in made-up texts, so that every group is mixed.
    """
    model, draw = directory / "model", random.Random(1)
    if tiny:
        make_hf_dir(model)
    else:
        make_model(model, dtype=dtype, texts=SAMPLE_TEXTS, seed=0)
    vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    length = tokens - PROMPT_TOKENS
    for step in range(1, steps + 1):
        ids = [tuple(draw.choices(range(2, vocab), k=PROMPT_TOKENS)) for _ in range(prompts)]
        samples = [
            Sample(
                group=n // group,
                prompt_ids=ids[n // group],
                response_ids=tuple(draw.choices(range(2, vocab), k=length)),
                logprobs=(-math.log(vocab),) * length,
                text="a" * (n % group) + "b" * group,
                finish_reason="length",
                version=step - 1,
            )
            for n in range(prompts * group)
        ]
        rows = [Prompt(row, str(row), "", each, "", "") for row, each in enumerate(ids)]
        write_step(directory / "saved", SavedStep(step, 1.0, 0, 0, rows, samples, [0.0] * len(samples)))
    sizes = {"num_steps": steps, "num_prompts": prompts, "group_size": group, "algo.snr.num_folds": 2}
    sizes |= {"data.max_prompt_tokens": PROMPT_TOKENS, "rollout.max_response_tokens": length}
    options = [f"{name}={value}" for name, value in sizes.items()]
    options += [f"model.path={model}", f"model.dtype={dtype}", "rollout.importance_sampling=none", *more]
    return ["tools/smoke.toml", f"rollout.replay={directory / 'saved'}", *options]


def replay(
    report: Report,
    layers_of: str = "local",
    *,
    tiny: bool = False,
    dtype: str = "bfloat16",
    prompts: int = 8,
    group: int = 8,
    tokens: int = 2048,
    steps: int = 4,
    more: Sequence[str] = (),
) -> None:
    """Steps with every mode of norms and without norms, each in a process of its own; the first step is not counted."""
    sizes: dict[str, Any] = {"dtype": dtype, "prompts": prompts, "group": group, "tokens": tokens, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = prepare(directory, tiny=tiny, **sizes, more=(f"model.transformer_impl={layers_of}", *more))
        found: dict[str, float] = {}
        for mode, options in MODES.items():
            arguments = [*run, *options, f"run_dir={directory / mode}"]
            subprocess.run([sys.executable, "-m", "oblr_megatron.cli", "train", *arguments], cwd=ROOT, check=True)
            text = (directory / mode / "metrics.jsonl").read_text(encoding="utf-8")
            records = [json.loads(line) for line in text.splitlines()][1:]
            found[mode] = statistics.median(_training_s(record) for record in records)
            report.put(f"seconds of training a step, {mode}", found[mode])
            report.put(f"GB at the peak, {mode}", max(record["perf/peak_memory_bytes"] for record in records) / 1e9)
            if "perf/mfu/actor" in records[-1]:
                report.put(f"MFU, {mode}", statistics.median(record["perf/mfu/actor"] for record in records))
            if mode != "plain":
                report.put(f"step / plain, {mode}", found[mode] / found["plain"])
            _compare_with_planner(report, mode, arguments, found[mode], engine=layers_of == "transformer_engine")


def _training_s(record: dict[str, float]) -> float:
    return sum(record.get(f"timing_s/{phase}", 0.0) for phase in TRAINING)


def _compare_with_planner(report: Report, mode: str, arguments: Sequence[str], seconds: float, *, engine: bool) -> None:
    device = this_device()
    if device is not None:
        config = load_config(Path(arguments[0]), list(arguments[1:]))
        setting = Setting(published("Qwen3-0.6B"), config, 1, PlannerMachine(device), transformer_engine=engine)
        predicted = sum(phase.seconds for phase in training_phases(setting).values())
        report.put(f"measured / planner, {mode}", seconds / predicted)


def contexts(
    report: Report, ranks: int = 2, *, tiny: bool = False, dtype: str = "bfloat16", tokens: int = 1024
) -> None:
    """Processes on each GPU during a run of several ranks; a rank belongs on its own GPU only."""
    earlier = processes_of_gpus()
    most: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = prepare(directory, tiny=tiny, dtype=dtype, prompts=4, group=4, tokens=tokens, steps=3)
        command = [sys.executable, "-m", "oblr_megatron.cli", "train", *run, f"run_dir={directory / 'run'}"]
        process = subprocess.Popen([*command, "--nproc-per-node", str(ranks)], cwd=ROOT)
        while process.poll() is None:
            most |= processes_of_gpus() - earlier
            time.sleep(POLL_S)
    report.put("exit status", process.returncode)
    report.put("GPUs with processes", len(most))
    report.put("processes on the fullest GPU", max(most.values(), default=0))


def processes_of_gpus() -> Counter[str]:
    """Number of processes by GPU, from nvidia-smi; nothing without it."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Counter()
    return count_processes(text)


def count_processes(text: str) -> Counter[str]:
    """Example: "GPU-a, 11\\nGPU-a, 12\\nGPU-b, 13\\n" -> {"GPU-a": 2, "GPU-b": 1}"""
    return Counter(line.partition(",")[0].strip() for line in text.splitlines() if line.startswith("GPU"))


def leaving(report: Report, ranks: int = 2, *, tiny: bool = False, dtype: str = "bfloat16", tokens: int = 1024) -> None:
    """Seconds from an exception on one rank, in the middle of a step, to the launcher's end."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = prepare(directory, tiny=tiny, dtype=dtype, prompts=4, group=4, tokens=tokens, steps=3)
        launcher = [
            sys.executable,
            "-m",
            "oblr_megatron.runtime.launch",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [*launcher, "-m", "tools.gpu_test.raising", *run, f"run_dir={directory / 'run'}"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        end = time.time()
    print(done.stdout)
    raised = [line.split()[-1] for line in done.stdout.splitlines() if RAISED in line]
    assert raised, "no rank raised"
    report.put("exit status", done.returncode)
    report.put("seconds from the exception to the end", end - float(raised[0]))


def exchange(report: Report, counts: Sequence[int] = (2, 4, 8), megabytes: float = 1.0, rounds: int = 5) -> None:
    """An all-gather of equally long objects over gloo (`Collectives.objects`)."""
    speed = 0.0
    for ranks in counts:
        with tempfile.TemporaryDirectory() as directory:
            arguments = (ranks, directory, int(megabytes * 1e6), rounds)
            multiprocessing.spawn(exchange_rank, arguments, nprocs=ranks)
            seconds = float((Path(directory) / "seconds").read_text(encoding="utf-8"))
        speed = ranks * megabytes / seconds
        report.put(f"seconds, {ranks} ranks of {megabytes:g} MB", seconds)
        report.put(f"MB/s that a rank receives, {ranks} ranks", speed)
    report.put(f"seconds at 1,024 ranks of {megabytes:g} MB, at that speed", 1024 * megabytes / speed)


def exchange_rank(rank: int, ranks: int, directory: str, num_bytes: int, rounds: int) -> None:
    """One rank; rank 0 writes the median."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    collectives, taken = Collectives(rank), []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        found = collectives.objects(bytes(num_bytes), what="an exchange", seconds=60)
        taken.append(time.perf_counter() - begin)
        assert [len(value) for value in found] == [num_bytes] * ranks
    if rank == 0:
        (Path(directory) / "seconds").write_text(str(statistics.median(taken[1:])), encoding="utf-8")
    dist.destroy_process_group()


def save(report: Report, layers: int = 28, vocab: int = 151_936, rounds: int = 3) -> None:
    """tools/bench/checkpoint.py: how long the step loop waits for a save, and how fast the state reaches the host."""
    sizes = ["--layers", str(layers), "--vocab", str(vocab), "--rounds", str(rounds)]
    for row in rows_of(["checkpoint.py", *sizes]):
        report.put(f"seconds, {row['what']}", row["seconds"])
        report.put(f"GB/s, {row['what']}", row["bytes"] / row["seconds"] / 1e9)
