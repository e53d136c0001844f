"""`oblr-megatron study collapse`: training against an engine with rounded weights, with and without score centering.

At every step the engine gets a rounded copy of the policy: matrices of a few bits, one scale for each row. The trainer
differentiates the policy itself. Everything else is a plain run: the toy model, a task's prompts and rewards, a
baseline, Adam. `--baseline mean` subtracts the average of earlier rewards. `none` takes r - 1 for A, so that A is never
positive, and a mean score that is not 0 pushes in one direction. Arms differ in the weights and in `algo.center`:

    rho = 1          what the engine drew is taken for the policy's own
    rho = cap        min(pi / mu, 2)

The engine returns its distribution over the whole vocabulary, so that centering leaves out nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oblr_megatron.algo.centering import expected_weights
from oblr_megatron.algo.importance import Level, truncated_ratios
from oblr_megatron.algo.loss import policy_gradient_loss, sample_coefficients
from oblr_megatron.errors import EXIT_OK
from studies.policy import Drawn, ToyPolicy
from studies.start import load, prepare, task_named
from studies.tasks import TASKS, Row, Task
from studies.toy_trainer import EVALUATION_SEED, score_batch

CAP, DECAY = 2.0, 0.9  # of rho; of the mean reward that is the baseline


@dataclass(frozen=True, slots=True)
class Arm:
    """One run. Example: Arm("walk", bits=4, weights="one", centre=True, seed=0)"""

    task: str
    bits: int
    weights: str  # "one" or "cap"
    centre: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The course of an arm, a value a step."""

    arm: Arm
    reward: list[float]  # mean of the engine's responses
    mismatch: list[float]  # mean |log pi - log mu| of the tokens, nats
    entropy: list[float]  # of the policy, nats
    accuracy: float  # of the trained policy itself on held-out rows


@torch.no_grad()
def round_weights(policy: ToyPolicy, engine: ToyPolicy, bits: int) -> None:
    """Copy the policy's weights, matrices rounded to the nearest of 2^bits - 1 levels of their row."""
    levels = 2 ** (bits - 1) - 1
    for exact, rounded in zip(policy.parameters, engine.parameters, strict=True):
        if exact.dim() < 2:
            rounded.copy_(exact)
            continue
        scale = exact.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
        rounded.copy_((exact / scale).round() * scale)


def trained(
    arm: Arm, start: Path, *, steps: int, num_prompts: int, group_size: int, lr: float, baseline: str = "mean"
) -> Curve:
    """Train one arm."""
    task = task_named(arm.task)
    policy, engine = load(start, task), load(start, task)
    rows, held_out = task.rows()
    optimizer = torch.optim.Adam(policy.parameters, lr=lr)
    generator, mean = torch.Generator().manual_seed(arm.seed), math.nan
    courses: list[tuple[float, float, float]] = []
    for _ in range(steps):
        round_weights(policy, engine, arm.bits)
        chosen = [rows[int(n)] for n in torch.randint(len(rows), (num_prompts,), generator=generator)]
        with torch.no_grad():
            prompts = [policy.encode(row.question) for row in chosen]
            samples = engine.sample(prompts, task.max_response_tokens, generator, copies=group_size)
            sampler = engine.logits(samples)[0].log_softmax(-1)  # [N, T, V]
        asked = [row for row in chosen for _ in range(group_size)]
        rewards = torch.tensor(score_batch(policy, task, asked, samples), dtype=torch.float64)
        mean = float(rewards.mean()) if math.isnan(mean) else mean
        advantages = rewards - (1.0 if baseline == "none" else mean)
        loss, mismatch, entropy = loss_of(policy, samples, sampler, advantages, arm, task)
        mean = DECAY * mean + (1 - DECAY) * float(rewards.mean())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        courses.append((float(rewards.mean()), float(mismatch), float(entropy)))
    reward, mismatches, entropies = (list(values) for values in zip(*courses, strict=True))
    return Curve(arm, reward, mismatches, entropies, accuracy(policy, task, held_out))


def loss_of(
    policy: ToyPolicy, samples: Sequence[Drawn], sampler: Tensor, advantages: Tensor, arm: Arm, task: Task
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the means of |log pi - log mu| and of the policy's entropy over the tokens.

    Args:
        policy: is differentiated.
        samples: N responses of the engine.
        sampler: [N, T, V] log mu.
        advantages: [N].
        arm: has the weights.
        task: has the largest length.
    """
    logits, tokens, mask = policy.logits(samples)
    logprobs = logits.log_softmax(-1)
    own, drawn = (values.gather(-1, tokens[..., None])[..., 0] for values in (logprobs, sampler))
    level: Level = "token" if arm.weights == "cap" else "none"
    rho, _ = truncated_ratios(own.detach(), drawn, mask, level=level, cap=CAP)
    lengths = mask.sum(1)
    coefficients = sample_coefficients(advantages, lengths, 1, len(samples), token_scale=task.max_response_tokens)
    loss = policy_gradient_loss(own, mask, coefficients, rho)
    if arm.centre:
        masses = expected_weights(logprobs.detach(), sampler, corrects=level != "none", cap=CAP, band=None)
        loss = loss - policy_gradient_loss((masses * logprobs).sum(-1), mask, coefficients, torch.ones_like(rho))
    certain = logprobs.detach()
    entropy = -(certain.exp() * certain).sum(-1)
    return loss, (own.detach() - drawn).abs()[mask].mean(), entropy[mask].mean()


@torch.no_grad()
def accuracy(policy: ToyPolicy, task: Task, rows: Sequence[Row]) -> float:
    """Share of held-out rows that a response drawn from the policy itself solves."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    samples = policy.sample([policy.encode(row.question) for row in rows], task.max_response_tokens, generator)
    return sum(value == 1.0 for value in score_batch(policy, task, rows, samples)) / len(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, default=Path("runs/collapse"), help="directory of curves and starts")
    parser.add_argument("--task", default="walk", choices=sorted(TASKS), help="the task")
    parser.add_argument("--skill", default="middle", choices=("low", "middle", "high"), help="of the warm start")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], help="of the engine's matrices")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm")
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of Adam")
    parser.add_argument("--baseline", default="mean", choices=("mean", "none"), help="subtracted from rewards")
    parser.add_argument("--prompts", type=int, default=16, help="Q")
    parser.add_argument("--group", type=int, default=8, help="G")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Train all arms and print a line for each."""
    start = prepare(options.task, options.skill, options.out / "starts")
    arms = [
        Arm(options.task, bits, weights, centre, seed)
        for bits in options.bits
        for weights in ("one", "cap")
        for centre in (False, True)
        for seed in range(options.seeds)
    ]
    sizes = {"steps": options.steps, "num_prompts": options.prompts, "group_size": options.group}
    more: dict[str, Any] = {"lr": options.lr, "baseline": options.baseline} | sizes
    print(
        "bits  rho  centre  seed  reward first, best, last  own accuracy  |log pi - log mu| first, last  entropy last"
    )
    with (options.out / "curves.jsonl").open("a", encoding="utf-8") as file:
        for arm in arms:
            curve = trained(arm, start, **more)
            file.write(json.dumps(asdict(curve)) + "\n")
            print(line(curve), flush=True)
    return EXIT_OK


def line(curve: Curve) -> str:
    """Means over a tenth of the steps: the first, the best and the last."""
    size = max(1, len(curve.reward) // 10)
    means = [statistics.fmean(curve.reward[at : at + size]) for at in range(0, len(curve.reward) - size + 1, size)]
    ends = [statistics.fmean(part) for part in (curve.mismatch[:size], curve.mismatch[-size:], curve.entropy[-size:])]
    arm = curve.arm
    return (
        f"{arm.bits:4}  {arm.weights:>4}  {'yes' if arm.centre else 'no':>5}  {arm.seed:4}  "
        f"{means[0]:.2f} {max(means):.2f} {means[-1]:.2f}  {curve.accuracy:.2f}  "
        f"{ends[0]:.3f} {ends[1]:.3f}  {ends[2]:.2f}"
    )
