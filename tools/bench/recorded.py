"""Measure what recorded tokens cost: steps with score centering, and with support replay, against steps without.

    python tools/bench/recorded.py MODEL_DIR --threads 1 --json run/bench/recorded.json

A step samples responses of a fixed length from a real engine, and computes their gradient with exact norms. Pushes,
rewards and the optimizer are left out, because they are the same in all arms. Rows:

- plain, center: no filter, without and with `algo.center`
- filter, replay: `rollout.top_k` with a `top_p` of 0.9, whole vocabulary scored or support replay

The arms alternate in one run, with the same seeds. Seconds are processor time of the trainer and the engine together,
so that a busy machine changes them little. `ratio` is the median over rounds of (row's seconds / those of the row
without recorded tokens) in one round. The first round is not counted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import torch
from record import publish
from rounds import paired_ratio
from transformers import AutoConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, ParallelConfig, parse_config
from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.rollout import open_engines
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.runtime.malloc import keep_freed_memory
from oblr_megatron.types import Prompt, Sample, Scored

BASE = {"plain": "plain", "center": "plain", "filter": "filter", "replay": "filter"}
PROMPT = 50  # tokens


@dataclass(frozen=True, slots=True)
class Row:
    """One arm. Example: Row("center", rounds=5, sampling_s=9.1, gradient_s=6.0, ratio=1.02, bytes=256.0, ...)"""

    arm: str
    rounds: int
    sampling_s: float  # median
    gradient_s: float  # median
    sampling_ratio: float
    gradient_ratio: float
    ratio: float  # of the step
    bytes: float  # of recorded tokens, for each token of a response
    file_bytes: float  # of a saved step, for each token of a response


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    keep_freed_memory()  # as a rank does
    torch.set_num_threads(options.threads)
    parallel = initialize(ParallelConfig())
    with ExitStack() as stack:
        stack.callback(shutdown)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configs = {arm: config_of(arm, options, scratch) for arm in BASE}
        engines = open_engines(configs["plain"], parallel)
        stack.callback(engines.close)
        policy = build_policy(AutoConfig.from_pretrained(options.model), configs["plain"].model, parallel)
        load_hf_weights(policy, options.model)
        rows = measure(configs, engines, policy, options, scratch)
    publish(rows, f"recorded tokens: {options.model.resolve().name}", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory in Hugging Face format")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--tokens", type=int, default=100, help="of a response")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the trainer and the engine")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(arguments)


def config_of(arm: str, options: argparse.Namespace, scratch: Path) -> Config:
    """The default recipe with one fold; norms take no pass of their own."""
    filters = {"top_p": 0.9, "top_k": options.top_k} if BASE[arm] == "filter" else {}
    return parse_config(
        {
            "run_dir": str(scratch / "run"),
            "num_prompts": options.prompts,
            "group_size": options.group,
            "model": {"path": str(options.model), "dtype": options.dtype},
            "data": {"train": "unused", "max_prompt_tokens": PROMPT},
            "rollout": {"max_response_tokens": options.tokens, "num_threads": options.threads} | filters,
            "algo": {"center": arm == "center", "snr": {"num_folds": 1}},
            "gradnorm": {"mode": "inline"},
            "parallel": {"micro_batch_tokens": options.group * (PROMPT + options.tokens)},
        }
    )


def measure(
    configs: dict[str, Config], engines: RolloutEngine, policy: Policy, options: argparse.Namespace, scratch: Path
) -> list[Row]:
    """The rows of all arms."""
    draw = random.Random(0)
    texts = [tuple(draw.randrange(2, policy.vocab_size) for _ in range(PROMPT)) for _ in range(options.prompts)]
    prompts = [Prompt(n, str(n), "", ids, "", "") for n, ids in enumerate(texts)]
    gradients = {arm: StepGradient(policy, config) for arm, config in configs.items()}
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in configs}
    samples: dict[str, list[Sample]] = {}
    for turn in range(options.rounds + 1):
        for arm in list(configs)[:: -1 if turn % 2 else 1]:
            request = SamplingRequest.for_training(configs[arm], seed=turn)
            request = replace(request, recorded=0) if arm == "filter" else request
            begin = processor_seconds()
            samples[arm] = engines.generate(prompts, request)
            middle = processor_seconds()
            add(gradients[arm], configs[arm], samples[arm])
            times[arm].append((middle - begin, processor_seconds() - middle))
    return [row_of(arm, times, prompts, samples[arm], scratch) for arm in configs]


def processor_seconds() -> float:
    """Of this process and its children: the engine."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))


def add(gradient: StepGradient, config: Config, samples: list[Sample]) -> None:
    """The gradient of a step, with rewards at random."""
    shape = config.num_prompts, config.group_size
    rewards = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scored = Scored(rewards, torch.tensor([sample.length for sample in samples]).view(shape), 0)
    gradient.begin(1).add(whole_step(Batch([], samples, scored)), AdvantageRule(scored, config))
    list(gradient.updates())


def row_of(
    arm: str,
    times: dict[str, list[tuple[float, float]]],
    prompts: list[Prompt],
    samples: list[Sample],
    scratch: Path,
) -> Row:
    """Medians over the rounds but the first."""
    own, base = times[arm][1:], times[BASE[arm]][1:]
    sampling, gradient = (paired_ratio([one[part] for one in own], [one[part] for one in base]) for part in (0, 1))
    tokens = sum(sample.length for sample in samples)
    path = write_step(scratch, SavedStep(1, 1.0, 0, 0, prompts, samples, [0.0] * len(samples)))
    return Row(
        arm,
        len(own),
        median(one[0] for one in own),
        median(one[1] for one in own),
        sampling,
        gradient,
        paired_ratio([sum(one) for one in own], [sum(one) for one in base]),
        sum(sample.recorded.nbytes for sample in samples if sample.recorded is not None) / tokens,
        path.stat().st_size / tokens,
    )


if __name__ == "__main__":
    main()
