"""`oblr-megatron study learning_rate`: the SGD rate that Theorem 4 of OBLR-PO predicts, against the best rate.

    E J(theta + eta g) >= J + eta S - C/2 eta^2 (S + tr(H) / N)     g of N prompts, S = ||grad J||^2
    best: eta = 1/C * shrink(N), shrink(N) = S / (S + tr(H) / N)    (arXiv 2511.23310, Theorem 4)

At points of a training path, the gradients of many single prompts give S and tr(H). A summary of the paper, which we
have not seen in full, gives C = B L + B^2 M with bounds that nobody knows beforehand. So the study measures 1/C as the
best rate along the mean gradient of all those prompts, where shrink is nearly 1. It then tests how
the best rate changes with N and along the path. For every N it builds batches from the same prompts' gradients; a line
search finds the rate with the largest gain of J, averaged over batches. J is the mean reward of many fresh samples,
drawn with the same random numbers at every rate.

Three rules are compared by the share of the best rate's gain that they keep:

    local     1/C measured at the point, times shrink: the theorem with all its quantities known
    shrink    1/C of the first point, times shrink: the snr schedule with eta_0 = 1/C and S, tr(H) known
    constant  the best rate at the first point for this N

The estimator is RLOO's, so that prompts are independent. The optimizer is SGD, the only one the theorem covers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from torch import Tensor

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.metrics import write_whole
from studies.estimator import Batch, fold_gradients, squares
from studies.smoothness import path
from studies.start import prepare, task_named
from studies.tasks import TASKS, Row, Skill, Task
from studies.toy_trainer import ToyConfig, score_batch

if TYPE_CHECKING:
    from studies.policy import ToyPolicy
    from studies.statistics import Array

AT_ONCE = 16  # prompts per pass: their score rows are in memory together
RESAMPLES = 500
OBJECTIVE_SEED = 104_729
RATES = tuple(float(rate) for rate in 1e-4 * 1.6 ** np.arange(16))  # 1e-4 to 0.12
LOST = -0.05  # once two rates in a row lose this much of J, larger rates are not tried


@dataclass(frozen=True, slots=True)
class Line:
    """One point of the path at one batch size.

    Example: Line("chain", "middle", step=0, num_prompts=16, batches=16, signal=1.2, noise=60.0, shrink=0.24,
                  inverse_c=0.2, best=0.06, low=0.04, high=0.09, rates=[...], gains=[...])
    """

    task: str
    skill: str
    step: int
    num_prompts: int  # N, prompts per batch
    batches: int  # number of batches that gains are averaged over
    signal: float  # S
    noise: float  # tr(H) of one prompt
    shrink: float  # shrink(N)
    inverse_c: float  # 1/C
    best: float  # the rate found by line search
    low: float  # 95% interval of `best`, over batches
    high: float
    rates: list[float]
    gains: list[float]  # gain of J at each rate, mean over batches

    @property
    def predicted(self) -> float:
        """The rate of the theorem, 1/C * shrink(N)."""
        return self.inverse_c * self.shrink


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of a measurement.

    Example: Search(group_size=8, batch_sizes=(4, 16, 64), max_batches=12, objective=1024, repeats=4, rates=RATES)
    """

    group_size: int
    batch_sizes: tuple[int, ...]
    max_batches: int  # per batch size
    objective: int  # number of prompts that J is measured on
    repeats: int  # responses per such prompt
    rates: tuple[float, ...]
    seed: int = 0


def measure(policy: ToyPolicy, task: Task, rows: Sequence[Row], search: Search, *, skill: str, step: int) -> list[Line]:
    """One line per batch size; an empty list if there is no measurable signal. Restores the policy.

    Args:
        policy: the policy at a point of the path.
        task: its reward is the objective J.
        rows: the last `search.objective` rows measure J, the others the gradient.
        search: settings.
        skill: skill of the start, for the lines.
        step: step of the path, for the lines.
    """
    own, asked = rows[: -search.objective], rows[-search.objective :]
    gradients = prompt_gradients(policy, task, own, search.group_size, search.seed)  # [M, P]
    signal, noise = moments(gradients)
    gain = Gain(policy, task, asked, search)
    everything = gain.curve(gradients.mean(0))
    if signal <= 0 or everything.max() <= 0:
        return []
    inverse_c = peak(search.rates, everything) / shrink(signal, noise, len(own))
    lines = []
    for size in search.batch_sizes:
        batches = gradients[: len(own) // size * size].view(-1, size, gradients.shape[1]).mean(1)[: search.max_batches]
        curves = np.stack([gain.curve(batch) for batch in batches])  # [batches, rates]
        point = (task.name, skill, step, size, len(batches), signal, noise, shrink(signal, noise, size), inverse_c)
        found = (peak(search.rates, curves.mean(0)), *peak_interval(search.rates, curves))
        lines.append(Line(*point, *found, list(search.rates), curves.mean(0).tolist()))
    return lines


def prompt_gradients(policy: ToyPolicy, task: Task, rows: Sequence[Row], group_size: int, seed: int) -> Tensor:
    """[M, P]: RLOO's gradient estimate from each row's group."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        asked = [row for row in part for _ in range(group_size)]
        prompts = [policy.encode(row.question) for row in part]
        samples = policy.sample(prompts, task.max_response_tokens, generator, copies=group_size)
        rewards = torch.tensor(score_batch(policy, task, asked, samples), dtype=torch.float64).view(
            len(part), group_size
        )
        batch = Batch(samples, rewards)
        values = advantages("rloo", rewards, torch.ones_like(rewards), batch.lengths)
        coefficients = sample_coefficients(values.flatten(), batch.lengths.flatten(), len(part), group_size)
        found.append(fold_gradients(policy.scores(samples), coefficients, len(part)))
    return torch.cat(found)


def moments(gradients: Tensor) -> tuple[float, float]:
    """Gradients [M, P] of independent prompts -> unbiased ||grad J||^2 (may be negative) and tr(H) of one prompt."""
    count, mean = len(gradients), gradients.mean(0)
    noise = float(squares(gradients - mean).sum()) / (count - 1)
    return float(squares(mean[None])) - noise / count, noise


def shrink(signal: float, noise: float, num_prompts: int) -> float:
    """S / (S + tr(H) / N)."""
    return signal / (signal + noise / num_prompts)


class Gain:
    """Computes J(theta + eta g) - J(theta), with the same random numbers at every rate."""

    def __init__(self, policy: ToyPolicy, task: Task, rows: Sequence[Row], search: Search) -> None:
        self._policy, self._task, self._rates = policy, task, search.rates
        self._asked = [row for row in rows for _ in range(search.repeats)]
        self._seed = OBJECTIVE_SEED + search.seed
        self._base = self._objective()

    def curve(self, direction: Tensor) -> Array:
        """Gains [rates] fp64 along [P]. After two rates in a row with a large loss, all larger rates get that loss."""
        start, found = self._policy.vector(), list[float]()
        for rate in self._rates:
            lost = len(found) > 1 and max(found[-2:]) < LOST
            if not lost:
                self._policy.assign(start + rate * direction)
            found.append(found[-1] if lost else self._objective() - self._base)
        self._policy.assign(start)
        return np.array(found)

    def _objective(self) -> float:
        """Mean reward. Every token has its own random number, so that similar policies draw similar samples."""
        generator = torch.Generator().manual_seed(self._seed)
        prompts = [self._policy.encode(row.question) for row in self._asked]
        samples = self._policy.sample(prompts, self._task.max_response_tokens, generator)
        return sum(score_batch(self._policy, self._task, self._asked, samples)) / len(samples)


def peak(rates: Sequence[float], gains: Array) -> float:
    """The rate where a curve peaks: vertex of the parabola in log eta through its highest point and neighbours."""
    top = int(np.argmax(gains))
    if top in (0, len(rates) - 1):
        return rates[top]
    left, middle, right = gains[top - 1 : top + 2]
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend < 0 else 0.0
    logs = np.log(rates)
    return float(np.exp(logs[top] + shift * (logs[top + 1] - logs[top - 1]) / 2))


def peak_interval(rates: Sequence[float], curves: Array) -> tuple[float, float]:
    """[batches, rates] -> 95% bootstrap interval of the peak of the mean curve, over batches."""
    picks = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    low, high = np.quantile([peak(rates, curves[pick].mean(0)) for pick in picks], [0.025, 0.975])
    return float(low), float(high)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study learning_rate`."""
    parser.add_argument("--out", type=Path, required=True, help="directory for table, chart and starts")
    parser.add_argument("--tasks", nargs="+", default=["sums", "chain", "brackets"], help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--skill", default="middle", choices=get_args(Skill), help="skill of the start")
    parser.add_argument("--points", nargs="+", type=int, default=[0, 30, 90], help="steps of the path to measure at")
    parser.add_argument("--lr", type=float, default=3e-4, help="Adam's learning rate of the path")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=[4, 16, 64], metavar="N", help="prompts per batch"
    )
    parser.add_argument("--batches", type=int, default=12, help="largest number of batches per size")
    parser.add_argument("--prompts", type=int, default=1024, help="prompts for the gradients")
    parser.add_argument("--objective", type=int, default=1024, help="prompts that J is measured on")
    parser.add_argument("--repeats", type=int, default=4, help="responses per such prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the run's prompts and samples (default: 0)")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure; write DIR/learning_rate.{json,md,svg,png}."""
    from oblr_megatron.checks.packages import require_for_studies
    from oblr_megatron.observe.console import progress
    from studies.learning_rate_report import write

    require_for_studies("matplotlib")
    tasks = [task_named(name) for name in options.tasks]
    if options.prompts < 2 * max(options.batch_sizes):
        what = f"{options.prompts} prompts make fewer than two batches of {max(options.batch_sizes)}"
        raise UserError(what, where="--prompts", fix="give twice the largest batch size or more")
    for task in tasks:
        if options.prompts + options.objective > (held := len(task.rows()[0])):
            what = f"{options.prompts} prompts and {options.objective} more for J, of {held} rows of {task.name}"
            raise UserError(what, where="--prompts, --objective", fix="lower one of them")
    torch.set_num_threads(1)
    search = Search(
        group_size=8,
        batch_sizes=tuple(options.batch_sizes),
        max_batches=options.batches,
        objective=options.objective,
        repeats=options.repeats,
        rates=RATES,
        seed=options.seed,
    )
    lines: list[Line] = []
    with progress("learning_rate", len(tasks) * len(options.points)) as advance:
        for task in tasks:
            for step, toy in path(_config(task.name, options), options.points):
                rows = toy.train[-options.prompts - options.objective :]
                found = measure(toy.policy, task, rows, search, skill=options.skill, step=step)
                if not found:
                    print(f"{task.name}, step {step}: no signal in {options.prompts} prompts; skipped")
                lines += found
                text = json.dumps([asdict(line) for line in lines], indent=1) + "\n"
                write_whole(options.out / "learning_rate.json", text)
                advance(1)
    if lines:
        print(write(lines, options.out))
    return EXIT_OK


def _config(task: str, options: argparse.Namespace) -> ToyConfig:
    """Config of the path: the default recipe."""
    start = prepare(task, options.skill, options.out / "starts")
    table = {"task": task, "skill": options.skill, "start_dir": start, "run_dir": options.out, "seed": options.seed}
    table |= {"num_steps": max(1, *options.points), "optimizer": {"lr": options.lr}}
    return ToyConfig.model_validate(table)
