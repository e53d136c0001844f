"""`oblr-megatron study variance`: variance of one prompt's gradient under every baseline, at a fixed policy.

    g_q = 1/G sum_i A_i s_i,     tr(H) = within + between
    within = E_q[E||g_q||^2 - ||E g_q||^2],     between = E_q||E g_q||^2 - ||E_q E g_q||^2

The noise of a batch of Q prompts is tr(H) / Q. A baseline changes only the part within a prompt. The part between
prompts is the same for every unbiased baseline and every G, so it limits what any baseline can save.

The study draws a pool of responses per prompt and computes the inner products of all token scores. Then ||g_q||^2 of
any group under any baseline, including token-wise ones, is a quadratic form of the advantages; no further backward pass
is needed. A deal splits each prompt's pool into disjoint groups, and so into batches of Q prompts, which priors need.
Disjoint groups of one deal are independent, so their inner products estimate ||E g_q||^2 without bias. Intervals are
bootstrapped over prompts, which covers both sources of randomness: the prompt and its pool.

Baselines that rescale the gradient (grpo, reinforce_pp, group_mean) change the trace by the scale alone. The study
therefore compares the noise-to-signal ratio within / ||E g||^2 relative to rloo's. For unbiased baselines this is the
ratio of traces. `total` is on the scale of an unbiased gradient too. `alignment` is the cosine of E g_q with E g_q
under the oracle: it shows how much a baseline rotates the gradient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.formulas import NO_HISTORY
from oblr_megatron.algo.weighting import sum_of_others, tempering
from oblr_megatron.config.baselines import BASELINES, Baseline, facts_of
from oblr_megatron.errors import EXIT_OK, UserError
from oblr_megatron.metrics import write_whole
from oblr_megatron.runtime.command_line import count
from studies.estimator import energies
from studies.policy import ToyPolicy, token_products
from studies.start import load, prepare, task_named
from studies.tasks import TASKS, Row, Skill, Task
from studies.token_baseline import otb

BOOTSTRAPS = 2000
OF_CELLS = {"skills": list(get_args(Skill)), "group_sizes": [1, 2, 4, 8, 16], "deals": 8}
"""Defaults of options that `--tempering` and `--thinning` do not have."""
OTB, ORACLE = "otb", "oracle"
PROXIES = {"pooled[logit]": "logit"}
TEMPERED = {"pooled[tempered]": 0.25}  # algo.norm_power
OWN = {name: f"studies.baselines:{name}" for name in ("eob", "james_stein", "reinforce_pp_baseline")}
"""Baselines of the studies."""
DEFAULT_TASKS = ("sums", "mixed", "chain", "walk", "brackets")  # responses of at most ten tokens: O(T^2) memory


@dataclass(frozen=True, slots=True)
class Pool:
    """n responses to each of Q prompts, with the inner products of their token scores."""

    rewards: Tensor  # [Q, n] fp64
    lengths: Tensor  # [Q, n]
    products: Tensor  # [Q, n, T, n, T] fp32: <s_it, s_ju>, inner products of token scores; 0 past the end
    energies: Tensor  # [Q, n, T] fp64: squared norm of each token's score with respect to the logits
    gradients: Tensor  # [Q, P]: each prompt's gradient from all n responses, by rloo

    @property
    def norms_sq(self) -> Tensor:
        """w [Q, n]: sums of the diagonal blocks of `products`."""
        return torch.einsum("qitiu->qi", self.products.double())

    def weights(self, source: str | None) -> Tensor:
        """w [Q, n]: the exact norm for None, or the proxy "logit"."""
        if source is None:
            return self.norms_sq
        return self.energies.sum(-1)

    @property
    def mean_sq(self) -> float:
        """||E_q E g_q||^2, without bias: mean inner product of the gradients of two different prompts."""
        rows = self.gradients.double()
        return float((rows.sum(0).square().sum() - rows.square().sum()) / (len(rows) * (len(rows) - 1)))


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    task: str
    skill: str
    group_size: int
    baseline: str
    trace: float  # the part within a prompt, mean over prompts
    signal: float  # ||E g_q||^2, mean over prompts
    alignment: float  # cosine of E g_q with the oracle's, over all prompts; 1 up to noise for unbiased baselines
    ratio: (
        float | None
    )  # noise-to-signal ratio (trace / signal) relative to rloo's; None for G = 1, where rloo has none
    low: float | None  # 95% interval of `ratio`
    high: float | None
    between: float  # the part between prompts
    total: float  # tr(H): `trace` on the oracle's scale + `between`


def draw_pool(policy: ToyPolicy, task: Task, rows: Sequence[Row], size: int, seed: int) -> Pool:
    """Draw n = `size` responses to each row and compute the inner products of their token scores."""
    generator = torch.Generator().manual_seed(seed)
    longest = task.max_response_tokens
    rewards, lengths, products, energy, gradients = [], [], [], [], []
    for row in rows:
        samples = policy.sample([policy.encode(row.question)], longest, generator, copies=size)
        scored = torch.tensor([task.reward(policy.decode(sample.tokens), row.answer) for sample in samples])
        rewards.append(scored.double())
        above = (scored - scored.mean()) / (size - 1)  # (r_i - mean of the others) / n
        gradients.append(above @ policy.scores(samples))
        lengths.append([len(sample.tokens) for sample in samples])
        products.append(token_products(policy, samples, longest))
        with torch.no_grad():
            logits, tokens, mask = policy.logits(samples)
        own = torch.zeros(size, longest, dtype=torch.float64)
        own[:, : mask.shape[1]] = energies(logits, tokens).masked_fill(~mask, 0.0)
        energy.append(own)
    found = torch.stack(rewards), torch.tensor(lengths), torch.stack(products), torch.stack(energy)
    return Pool(*found, torch.stack(gradients))


def deals(num_prompts: int, pool_size: int, group_size: int, count: int, seed: int) -> list[Tensor]:
    """`count` deals [m, Q, G]: indices of m disjoint groups of each prompt's pool."""
    generator = torch.Generator().manual_seed(seed)
    used = pool_size - pool_size % group_size
    found = []
    for _ in range(count):
        order = torch.rand(num_prompts, pool_size, generator=generator).argsort(-1)[:, :used]
        found.append(order.view(num_prompts, -1, group_size).transpose(0, 1))
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """One batch of a deal; [Q, G] unless noted."""

    rewards: Tensor
    norms_sq: Tensor
    lengths: Tensor
    energies: Tensor  # [Q, G, T]
    best: Tensor  # [Q, 1]: E[w r] / E[w], from the rest of the pool
    pooled: dict[str, Tensor]  # baseline -> [Q]: its b, from the responses to the other prompts
    mean_norm: float  # mean w of the pool


def token_wise(name: str, group: Group) -> Tensor:
    """Advantages A [Q, G, T] of a baseline. Only otb's differ between tokens."""
    shape = group.energies.shape
    if name == OTB:
        return otb(group.rewards, group.energies.flatten(0, 1), group.lengths).view(shape)
    if name == ORACLE:
        values = group.rewards - group.best
    else:
        proxy = PROXIES.get(name)
        norms = {None: group.norms_sq, "logit": group.energies.sum(-1)}[proxy]
        baseline = name.partition("[")[0]
        history = replace(NO_HISTORY, expected=group.pooled.get(name))
        values = advantages(OWN.get(baseline, baseline), group.rewards, norms, group.lengths, history)
        values = values * tempering(norms, group.mean_norm, TEMPERED.get(name, 0.0))
    return values[..., None].expand(shape)


def names_for(group_size: int) -> list[str]:
    """The baselines that the study measures. With one response to a prompt, only those that read no group remain.

    Left out: `optimal_pooled`, because its pull is a result of earlier steps.
    """
    names = [name for name in (*BASELINES, *OWN) if name != "optimal_pooled"]
    alone = [name for name in (*names, *PROXIES, *TEMPERED) if _facts(name).over == "nothing"]
    return [*names, OTB, ORACLE, *PROXIES, *TEMPERED] if group_size > 1 else [*alone, ORACLE]


def _facts(name: str) -> Baseline:
    baseline = name.partition("[")[0]
    return facts_of(OWN.get(baseline, baseline))


def pooled_values(pool: Pool, name: str) -> Tensor:
    """b [Q] of a pooled baseline: the weighted mean reward of all responses to the other prompts."""
    plain = _facts(name).pool == "plain"
    weights = torch.ones_like(pool.rewards) if plain else pool.weights(PROXIES.get(name))
    return sum_of_others((weights * pool.rewards).sum(-1)) / sum_of_others(weights.sum(-1))


def measure(pool: Pool, group_size: int, *, num_deals: int, seed: int) -> dict[str, Tensor]:
    """Baseline -> [3, Q] fp64: unbiased E||g_q||^2, ||E g_q||^2, and <E g_q, E g_q under the oracle>."""
    num_prompts, size = pool.rewards.shape
    names, norms_sq = names_for(group_size), pool.norms_sq
    pooled = {name: pooled_values(pool, name) for name in names if name not in (OTB, ORACLE) and _facts(name).pool}
    sums = {name: torch.zeros(3, num_prompts, dtype=torch.float64) for name in names}
    prompts = torch.arange(num_prompts)[:, None]
    for deal in deals(num_prompts, size, group_size, num_deals, seed):
        spread = {name: torch.zeros_like(pool.energies) for name in names}  # A at each response's place in the pool
        for members in deal:
            outside = torch.ones_like(norms_sq).scatter(1, members, 0.0) * norms_sq
            best = (outside * pool.rewards).sum(1, keepdim=True) / outside.sum(1, keepdim=True)
            group = Group(
                rewards=pool.rewards.gather(1, members),
                norms_sq=norms_sq.gather(1, members),
                lengths=pool.lengths.gather(1, members),
                energies=pool.energies[prompts, members],
                best=best,
                pooled=pooled,
                mean_norm=float(norms_sq.mean()),
            )
            for name in names:
                spread[name][prompts, members] = token_wise(name, group)
        for name in names:
            found = moments(spread[name], spread[ORACLE], pool.products, deal)
            sums[name] += found / (group_size**2 * num_deals)
    return sums


def moments(spread: Tensor, other: Tensor, products: Tensor, deal: Tensor) -> Tensor:
    """Second moments over the groups of a deal: [3, Q].

    Row 0 is the mean of ||G g||^2 over groups, row 1 the mean of <G g, G g'> over pairs of different groups. Row 2 is
    row 1 with g' under the other baseline's advantages.

    Args:
        spread: [Q, n, T] advantages.
        other: [Q, n, T] advantages of another baseline.
        products: [Q, n, T, n, T], see `Pool`.
        deal: [m, Q, G] members of each group.
    """
    count = len(deal)
    member = torch.zeros(*spread.shape[:2], count, dtype=torch.float64)  # [Q, n, m]
    for number, members in enumerate(deal):
        member[:, :, number].scatter_(1, members, 1.0)
    half = torch.einsum("qit,qitju->qiju", spread, products.double())
    found = []
    for each in (spread, other):
        between = torch.einsum("qiju,qju->qij", half, each)  # [Q, n, n]
        blocks = torch.einsum("qim,qij,qjk->qmk", member, between, member)  # [Q, m, m]
        own = blocks.diagonal(dim1=1, dim2=2).sum(-1)
        found += [own / count, (blocks.sum((1, 2)) - own) / (count * (count - 1))]
    return torch.stack([found[0], found[1], found[3]])


def cells(task: str, skill: str, group_size: int, found: dict[str, Tensor], mean_sq: float, seed: int) -> list[Cell]:
    """One cell per baseline, with a bootstrap interval over prompts."""
    num_prompts = found[ORACLE].shape[1]
    picks = np.random.default_rng(seed).integers(0, num_prompts, (BOOTSTRAPS, num_prompts))
    rloo = _noise_to_signal(found["rloo"], picks) if "rloo" in found else None
    truth = float(found[ORACLE][1].mean())
    result = []
    for name, sums in found.items():
        values = None if rloo is None else _noise_to_signal(sums, picks) / rloo
        low, high = (None, None) if values is None else map(float, np.quantile(values[1:], [0.025, 0.975]))
        second, signal, cross = sums.mean(1).tolist()
        aligned = cross / (signal * truth) ** 0.5 if min(signal, truth) > 0 else float("nan")
        own = (second - signal, signal, aligned, None if values is None else float(values[0]), low, high)
        between = truth - mean_sq
        result.append(Cell(task, skill, group_size, name, *own, between, (second - signal) * truth / signal + between))
    return result


def _noise_to_signal(sums: Tensor, picks: NDArray[np.int64]) -> NDArray[np.float64]:
    """[1 + BOOTSTRAPS]: the ratio over all prompts, then over each resample."""
    both = torch.stack([sums[0] - sums[1], sums[1]]).numpy()  # [2, Q]
    means = np.concatenate([both.mean(1, keepdims=True), both[:, picks].mean(-1)], axis=1)
    ratio: NDArray[np.float64] = means[0] / means[1]
    return ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `study variance`."""
    parser.add_argument("--out", type=Path, required=True, help="results; repeat the command to continue")
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument(
        "--skills", nargs="+", default=OF_CELLS["skills"], choices=get_args(Skill), help="skills of the starts"
    )
    parser.add_argument(
        "--group-sizes",
        nargs="+",
        type=count,
        default=OF_CELLS["group_sizes"],
        metavar="G",
        help="responses per prompt",
    )
    parser.add_argument("--prompts", type=count, default=64, help="Q, prompts per batch")
    parser.add_argument("--pool", type=count, default=64, help="responses per prompt")
    parser.add_argument("--deals", type=count, default=OF_CELLS["deals"], help="times a pool is dealt into groups")
    parser.add_argument("--seed", type=int, default=0, help="of samples, deals and resamples (default: 0)")
    for name, what in (("tempering", "algo.norm_power"), ("thinning", "algo.keep and its rivals")):
        parser.add_argument(f"--{name}", action="store_true", help=f"instead: {what}, along a run of `pooled`")
    parser.add_argument("--steps", nargs="+", type=int, default=[0, 10, 25, 50], help="of that run, to measure at")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate of that run (default: 1e-3)")
    parser.set_defaults(function=run)


def run(options: argparse.Namespace) -> int:
    """Measure the missing cells; write variance.{json,md,svg,png}. Or the other study, see reweighting.py.

    Raises:
        UserError: a size or number is too small, or the directory has cells of other settings.
    """
    from oblr_megatron.checks.packages import require_for_studies
    from oblr_megatron.observe.console import progress
    from studies import reweighting
    from studies.variance_report import write

    if options.prompts < 2:
        raise UserError("one prompt shows no noise between prompts", where="--prompts", fix="give 2 or more")
    if options.tempering or options.thinning:
        for name, default in OF_CELLS.items():
            if getattr(options, name) != default:
                what = "no option of --tempering and --thinning"
                raise UserError(what, where=f"--{name.replace('_', '-')}", fix="remove it")
        if options.pool < 2:
            raise UserError("one response shows no noise within a prompt", where="--pool", fix="give 2 or more")
        return reweighting.run(options)
    require_for_studies("matplotlib")
    tasks = [task_named(name) for name in options.tasks]
    largest = max(options.group_sizes)
    if largest == 1:
        raise UserError("RLOO needs a group of 2 or more", where="--group-sizes", fix="give a size above 1, too")
    if options.pool < 2 * largest:  # signal comes from pairs of groups
        what = f"--pool {options.pool} has fewer than two groups of {largest}"
        raise UserError(what, where="--group-sizes", fix="lower it, or give a pool of twice its size or more")
    torch.set_num_threads(1)
    file = options.out / "variance.json"
    settings = {name: getattr(options, name) for name in ("group_sizes", "prompts", "pool", "deals", "seed")}
    lines = read_cells(file, settings)
    wanted = [(task, skill) for task in tasks for skill in options.skills]
    with progress("variance", len(wanted)) as advance:
        for task, skill in wanted:
            if (task.name, skill) not in {(line.task, line.skill) for line in lines}:
                lines += cells_of(task, skill, options)
                record = {"settings": settings, "cells": [asdict(line) for line in lines]}
                write_whole(file, json.dumps(record, indent=1) + "\n")
            advance(1)
    print(write(lines, options.out))
    return EXIT_OK


def read_cells(file: Path, settings: dict[str, Any]) -> list[Cell]:
    """Cells of earlier calls with the same settings. A task at a skill is complete or absent.

    Raises:
        UserError: they were measured with other settings, or the file is damaged.
    """
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        before, lines = dict(found["settings"]), [Cell(**line) for line in found["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("not a file of this study", where=str(file), fix="remove it, or give another --out") from error
    for name, value in settings.items():
        if before.get(name) != value:
            what = f"its cells were measured with {name} {before.get(name)}, not {value}"
            raise UserError(what, where=str(file), fix="give the same options, or another --out")
    return lines


def cells_of(task: Task, skill: Skill, options: argparse.Namespace) -> list[Cell]:
    """Measure all group sizes and baselines of one task at one skill."""
    policy = load(prepare(task.name, skill, options.out / "starts"), task)
    pool = draw_pool(policy, task, task.rows()[1][: options.prompts], options.pool, options.seed)
    lines = []
    for group_size in options.group_sizes:
        found = measure(pool, group_size, num_deals=options.deals, seed=options.seed)
        lines += cells(task.name, skill, group_size, found, pool.mean_sq, options.seed)
    return lines
