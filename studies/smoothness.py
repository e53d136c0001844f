"""`oblr-megatron study smoothness`: size of the constants in OBLR-PO's step-size bound along a training path.

The bound (arXiv 2511.23310, Theorem 4) uses C = B L + B^2 M with |r - b| <= B, a bound M on E||s||^2, and a Lipschitz
constant L of the score: ||s(theta') - s(theta)|| <= L ||theta' - theta||. eta_0 stands for 1/C. The study measures, at
points of a run, in fp64:

    M            mean of w = ||s||^2 over fresh responses
    L            largest |eigenvalue| of the Hessian of log pi(o), by power iteration: mean and maximum over responses
    L along g    ||s(theta + e d) - s(theta)|| / e along d = g / ||g||, mean over responses: what a step experiences
    1/C          1 / (L + M), from the means with B = 1: the rate that the bound allows without noise
    J''          curvature of the mean reward along d, from importance-weighted responses; beyond an SGD rate of
                 1/|J''|, a quadratic model of J along the gradient decreases
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from oblr_megatron.config import OptimizerConfig
from oblr_megatron.errors import EXIT_OK
from studies.estimator import squares
from studies.policy import Drawn, ToyPolicy
from studies.start import load, prepare, task_named
from studies.tasks import TASKS
from studies.toy_trainer import ToyConfig, ToyRun, score_batch

SHIFT = 1e-4  # distance in parameter space for finite differences in fp64
ITERATIONS = 12  # of the power method; gives the largest eigenvalue to a few percent
CURVED = 8  # number of responses for which a Hessian's eigenvalue is computed


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a path. Example: Point("sums", 50, 0.81, 1430.0, 310.0, 902.0, 41.0, 5.7e-4, 3.1)."""

    task: str
    step: int
    accuracy: float  # held-out accuracy of sampled responses
    score_sq: float  # M
    lipschitz_mean: float  # L
    lipschitz_max: float
    lipschitz_along_gradient: float
    bound_rate: float  # 1 / (L + M), L and M means
    curvature: float  # J'' along the normalised gradient


def path(config: ToyConfig, at: Sequence[int]) -> Iterator[tuple[int, ToyRun]]:
    """Train a run and yield (step, run) at the given steps; step 0 is before training."""
    toy, done = ToyRun(config), 0
    for target in sorted(at):
        while done < target:
            toy.step(done)
            done += 1
        yield done, toy


def path_config(task: str, options: argparse.Namespace) -> ToyConfig:
    """A default config without clipping, with the given learning rate, up to the last measured step."""
    return ToyConfig(
        task=task,
        start_dir=prepare(task, "low", options.out / "starts"),
        run_dir=options.out,
        seed=options.seed,
        num_steps=max(1, *options.steps),
        optimizer=OptimizerConfig(lr=options.lr, clip_grad=0.0),
    )


def measure(toy: ToyRun, step: int, *, responses: int, seed: int) -> Point:
    """Measure the constants at the current policy."""
    config, task = toy.config, toy.task
    policy = load(config.start_dir, task, temperature=config.temperature, dtype=torch.float64)
    policy.assign(toy.policy.vector().double())
    samples, rewards = fresh(policy, toy, responses, seed)
    scores = policy.scores(samples)  # S [n, P]
    gradient = (rewards - rewards.mean()) @ scores / len(samples)
    direction = gradient / gradient.norm()
    here = policy.vector()
    policy.assign(here + SHIFT * direction)
    along = squares(policy.scores(samples) - scores).sqrt() / SHIFT
    policy.assign(here)
    curved = torch.tensor([top_curvature(policy, sample, seed) for sample in samples[:CURVED]])
    mean_sq = float(squares(scores).mean())
    return Point(
        task=task.name,
        step=step,
        accuracy=toy.evaluate()[f"eval/{task.name}/mean_at_k"],
        score_sq=mean_sq,
        lipschitz_mean=float(curved.mean()),
        lipschitz_max=float(curved.max()),
        lipschitz_along_gradient=float(along.mean()),
        bound_rate=1 / (float(curved.mean()) + mean_sq),
        curvature=reward_curvature(policy, samples, rewards, direction),
    )


def fresh(policy: ToyPolicy, toy: ToyRun, count: int, seed: int) -> tuple[list[Drawn], Tensor]:
    """One response to each of `count` training prompts, and the rewards [n] fp64."""
    generator = torch.Generator().manual_seed(seed)
    rows = [toy.train[position % len(toy.train)] for position in range(count)]
    samples = policy.sample([policy.encode(row.question) for row in rows], toy.task.max_response_tokens, generator)
    return samples, torch.tensor(score_batch(policy, toy.task, rows, samples), dtype=torch.float64)


def top_curvature(policy: ToyPolicy, sample: Drawn, seed: int) -> float:
    """|largest eigenvalue| of the Hessian of log pi(o), by power iteration on differences of gradients."""
    here, ones = policy.vector(), torch.ones(1, dtype=torch.float64)
    direction = torch.randn(len(here), generator=torch.Generator().manual_seed(seed), dtype=here.dtype)
    size = 0.0
    for _ in range(ITERATIONS):
        direction = direction / direction.norm()
        ends = []
        for sign in (1, -1):
            policy.assign(here + sign * SHIFT * direction)
            ends.append(policy.gradient([sample], ones))
        direction = (ends[0] - ends[1]) / (2 * SHIFT)
        size = float(direction.norm())
    policy.assign(here)
    return size


def reward_curvature(policy: ToyPolicy, samples: Sequence[Drawn], rewards: Tensor, direction: Tensor) -> float:
    """d^2/de^2 E[r] along a unit direction at e = 0: E[(r - mean) ((d.s)^2 + d.H d)] by differences of log pi."""
    here, found = policy.vector(), []
    for shift in (-10 * SHIFT, 0.0, 10 * SHIFT):
        policy.assign(here + shift * direction)
        with torch.no_grad():
            found.append(policy.logprobs(samples)[0].sum(1))
    policy.assign(here)
    weights = [(each - found[1]).exp() for each in found]  # importance ratios of the same responses
    second = (weights[0] - 2 * weights[1] + weights[2]) / (10 * SHIFT) ** 2
    return float(((rewards - rewards.mean()) * second).mean())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study smoothness`."""
    parser.add_argument("--out", type=Path, required=True, help="directory for table and starts")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[0, 10, 30, 80], metavar="STEP", help="steps of the run to measure at"
    )
    parser.add_argument("--lr", type=float, default=5e-4, help="Adam's learning rate of the run")
    parser.add_argument("--responses", type=int, default=256, help="responses to measure on (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the run's prompts and samples (default: 0)")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure; write smoothness.json and smoothness.md.

    Raises:
        UserError: a task does not exist.
    """
    from oblr_megatron.observe.console import progress

    for name in options.tasks:
        task_named(name)
    torch.set_num_threads(1)
    points = []
    with progress("smoothness", len(options.tasks) * len(options.steps)) as advance:
        for name in options.tasks:
            for step, toy in path(path_config(name, options), options.steps):
                points.append(measure(toy, step, responses=options.responses, seed=options.seed))
                advance(1)
    (options.out / "smoothness.json").write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    text = document(points)
    (options.out / "smoothness.md").write_text(text, encoding="utf-8")
    print(text)
    return EXIT_OK


def document(points: Sequence[Point]) -> str:
    """The table, one line per point."""
    lines = [
        "| task | step | accuracy | M | L mean | L max | L along g | 1/C | J'' along g | 1/abs(J'') |",
        "|---|" + "---:|" * 9,
    ]
    for p in points:
        lines.append(
            f"| {p.task} | {p.step} | {p.accuracy:.2f} | {p.score_sq:.3g} | {p.lipschitz_mean:.3g} | "
            f"{p.lipschitz_max:.3g} | {p.lipschitz_along_gradient:.3g} | {p.bound_rate:.2g} | {p.curvature:.3g} | "
            f"{1 / abs(p.curvature):.2g} |"
        )
    return "\n".join(lines) + "\n"
