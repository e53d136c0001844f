"""`oblr-megatron study kl`: effect of a KL penalty on the optimal baseline, the noise and the learning rate.

With the penalty, a response's term of the gradient is (r - b) s - beta k, with k = sum_t kappa_t grad log pi(o_t) as in
algo/kl.py. The constant baseline b with the least variance is

    b* = E[<s, r s - beta k>] / E[w] = E[w r] / E[w] - beta E<s, k> / E[w]

instead of OBLR-PO's E[w r] / E[w], which `optimal` and `optimal_prior` estimate for every beta. At points of a run
without a penalty, the study measures this shift, the variance that ignoring it costs, and how signal and noise change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from oblr_megatron.algo.kl import KLForm, kl_penalty, kl_slope
from oblr_megatron.errors import EXIT_OK, UserError
from studies.policy import ToyPolicy, token_products
from studies.smoothness import path, path_config
from studies.start import load, task_named
from studies.tasks import TASKS
from studies.toy_trainer import ToyRun
from studies.variance import DEFAULT_TASKS, deals, moments

FORMS: tuple[KLForm, ...] = ("k2", "k3")
GROUP_SIZE, BATCH = 8, 128  # G and Q of the shrink factors, as in the paper


@dataclass(frozen=True, slots=True)
class Line:
    """One point at one beta. Example: Line("sums", 50, "k3", 0.1, 0.8, 1.9, -0.02, 1.003, 1.4, 0.61, 0.63)."""

    task: str
    step: int
    form: KLForm
    beta: float
    accuracy: float  # mean reward of the drawn responses
    divergence: float  # nats per response: mean over responses of sum_t k3
    shift: float  # b* - E[w r] / E[w], mean over prompts
    cost: float  # tr(H | q) with baseline E[w r] / E[w], relative to b*
    noise: float  # tr(H | q) relative to no penalty, both with baseline E[w r] / E[w]
    shrink_without: float  # signal / (signal + noise / Q) without a penalty, Q prompts of G responses
    shrink: float  # the same with the penalty


@dataclass(frozen=True, slots=True)
class Drawn:
    """n responses to each of Q prompts, and the penalty's token weights."""

    rewards: Tensor  # [Q, n] fp64
    products: Tensor  # [Q, n, T, n, T] fp32, as in `variance.Pool`
    slopes: Tensor  # [Q, n, T] fp64, kappa
    divergence: float  # nats per response


def draw(
    policy: ToyPolicy, reference: ToyPolicy, toy: ToyRun, form: KLForm, *, prompts: int, size: int, seed: int
) -> Drawn:
    """Draw responses to held-out prompts."""
    generator, longest = torch.Generator().manual_seed(seed), toy.task.max_response_tokens
    rewards, products, slopes, penalties = [], [], [], []
    for row in toy.held_out[:prompts]:
        samples = policy.sample([policy.encode(row.question)], longest, generator, copies=size)
        rewards.append([toy.task.reward(policy.decode(sample.tokens), row.answer) for sample in samples])
        products.append(token_products(policy, samples, longest))
        with torch.no_grad():
            difference = (policy.logprobs(samples)[0] - reference.logprobs(samples)[0]).double()
        own = torch.zeros(size, longest, dtype=torch.float64)
        own[:, : difference.shape[1]] = kl_slope(difference, form)
        slopes.append(own)
        penalties.append(float(kl_penalty(difference, "k3").sum(1).mean()))
    return Drawn(
        torch.tensor(rewards, dtype=torch.float64),
        torch.stack(products),
        torch.stack(slopes),
        sum(penalties) / len(penalties),
    )


def measure(
    toy: ToyRun, step: int, form: KLForm, betas: Sequence[float], *, prompts: int, size: int, seed: int
) -> list[Line]:
    """One line per beta at the current policy."""
    reference = load(toy.config.start_dir, toy.task, temperature=toy.config.temperature)
    drawn = draw(toy.policy, reference, toy, form, prompts=prompts, size=size, seed=seed)
    norms_sq = torch.einsum("qitiu->qi", drawn.products.double())
    best = (norms_sq * drawn.rewards).sum(1) / norms_sq.sum(1)  # E[w r] / E[w] of each prompt
    shift = shift_per_beta(drawn, norms_sq)
    found = []
    plain = spread_moments(drawn, best, 0.0, seed)
    for beta in betas:
        usual = spread_moments(drawn, best, beta, seed)
        shifted = spread_moments(drawn, best + beta * shift, beta, seed)
        found.append(
            Line(
                task=toy.task.name,
                step=step,
                form=form,
                beta=beta,
                accuracy=float(drawn.rewards.mean()),
                divergence=drawn.divergence,
                shift=beta * float(shift.mean()),
                cost=trace(usual) / trace(shifted),
                noise=trace(usual) / trace(plain),
                shrink_without=shrink(plain),
                shrink=shrink(usual),
            )
        )
    return found


def shift_per_beta(drawn: Drawn, norms_sq: Tensor) -> Tensor:
    """[Q]: -E<s, k> / E[w], the derivative of b* with respect to beta."""
    along = torch.einsum("qitiu,qiu->qi", drawn.products.double(), drawn.slopes)  # <s_i, k_i>
    return -along.sum(1) / norms_sq.sum(1)


def spread_moments(drawn: Drawn, baseline: Tensor, beta: float, seed: int) -> tuple[float, float]:
    """(E||g_q||^2, ||E g_q||^2), means over prompts, with weight r - b - beta kappa_t at each token."""
    prompts, size = drawn.rewards.shape
    present = torch.einsum("qitit->qit", drawn.products) > 0  # tokens with a score
    weights = ((drawn.rewards - baseline[:, None])[..., None] - beta * drawn.slopes) * present
    (deal,) = deals(prompts, size, GROUP_SIZE, 1, seed)
    second, signal, _ = moments(weights, weights, drawn.products, deal).mean(1).tolist()
    return second / GROUP_SIZE**2, signal / GROUP_SIZE**2


def trace(both: tuple[float, float]) -> float:
    """tr(H | q) from the two moments."""
    return both[0] - both[1]


def shrink(both: tuple[float, float]) -> float:
    """The shrink factor of a batch of BATCH prompts."""
    return both[1] / (both[1] + trace(both) / BATCH)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study kl`."""
    parser.add_argument("--out", type=Path, required=True, help="directory for table and starts")
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument(
        "--steps", nargs="+", type=int, default=[10, 30, 80], metavar="STEP", help="steps of the run to measure at"
    )
    parser.add_argument(
        "--betas", nargs="+", type=float, default=[0.001, 0.01, 0.1], metavar="BETA", help="coefficients of the penalty"
    )
    parser.add_argument("--lr", type=float, default=5e-4, help="Adam's learning rate of the run")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts to measure on")
    parser.add_argument("--pool", type=int, default=64, help="responses per prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the run's prompts and samples (default: 0)")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure; write kl.json and kl.md.

    Raises:
        UserError: a task does not exist, or a pool makes no two groups.
    """
    from oblr_megatron.observe.console import progress

    for name in options.tasks:
        task_named(name)
    if options.pool < 2 * GROUP_SIZE:  # signal comes from pairs of groups
        what = f"--pool {options.pool} has fewer than two groups of {GROUP_SIZE}"
        raise UserError(what, where="--pool", fix=f"give {2 * GROUP_SIZE} or more")
    torch.set_num_threads(1)
    lines: list[Line] = []
    with progress("kl", len(options.tasks) * len(options.steps)) as advance:
        for name in options.tasks:
            sizes = {"prompts": options.prompts, "size": options.pool, "seed": options.seed}
            for step, toy in path(path_config(name, options), options.steps):
                lines += [line for form in FORMS for line in measure(toy, step, form, options.betas, **sizes)]
                advance(1)
    (options.out / "kl.json").write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    text = document(lines)
    (options.out / "kl.md").write_text(text, encoding="utf-8")
    print(text)
    return EXIT_OK


def document(lines: Sequence[Line]) -> str:
    """The table, one line per point and beta."""
    head = "task, step, mean reward, KL in nats, form, beta, shift of b*, cost of ignoring it, noise, shrink, with KL"
    rows = [f"| {head.replace(', ', ' | ')} |", "|---|" + "---:|" * 10]
    for each in lines:
        where = f"| {each.task} | {each.step} | {each.accuracy:.2f} | {each.divergence:.2g} | {each.form} | "
        found = f"{each.beta:g} | {each.shift:+.2g} | {each.cost:.3g} | {each.noise:.4g} | "
        rows.append(f"{where}{found}{each.shrink_without:.2f} | {each.shrink:.2f} |")
    return "\n".join(rows) + "\n"
