"""`oblr-megatron study variance --tempering` and `--thinning`: factors on single responses, along a run of `pooled`.

    x = f A s,   A = r - b,   b the pooled reward of the other prompts,   mu = E[A s]

Tempering has f = (wbar / w)^gamma. The best gain of a step at G = 1 is in proportion to

    <E x, mu>^2 / (E||x||^2 - ||E x||^2)        relative to f = 1: eff, the gain in samples where noise is large
    cos = <E x, mu> / (||E x|| ||mu||)           what is left of eff where a large batch has removed the noise

Thinning has f = kept / pi, so that E x = mu. Its noise is E||x||^2 - ||mu||^2, relative to the noise with all tokens.
Rules with one pi for a response have E||x||^2 = E[A^2 w / pi]. The pi of a step come from one response to each prompt.

Inner products of means come from pairs of different prompts, without bias. Intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.formulas import NO_HISTORY
from oblr_megatron.algo.thinning import inclusion, sampled_energies
from oblr_megatron.algo.weighting import sum_of_others, tempering
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.errors import EXIT_OK
from studies.policy import ToyPolicy, token_products
from studies.start import prepare, task_named
from studies.tasks import Row, Task
from studies.toy_trainer import ToyConfig, ToyRun, score_batch

POWERS = (0.0, 0.125, 0.25, 0.375, 0.5)
SHARES = (0.5, 0.25)  # algo.keep
THINNED = ("pooled", "pooled_mean")  # baselines; the rivals' own weigh all rewards alike
MOST_PRUNED = 0.9  # largest published rate of pruning
BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class Responses:
    """n responses to each of Q prompts. T is the longest response."""

    advantages: Tensor  # A f [K, Q, n] fp64, one row for each of POWERS
    norms_sq: Tensor  # w [Q, n] fp64
    products: Tensor  # [Q, n, T, T] fp64, inner products of the token scores of a response; 0 past its end
    sampled: Tensor  # e [Q, n], `sampled_energies`
    lengths: Tensor  # [Q, n], tokens of the response
    tokens: Tensor  # [Q, n], tokens of prompt and response
    gradients: Tensor  # [K, Q, P] fp32: each prompt's mean of A f s
    thinned: dict[str, Tensor]  # baseline of THINNED -> A [Q, n]
    reward: float  # mean


@dataclass(frozen=True, slots=True)
class Value:
    """A measured value and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Point:
    """One policy of a run."""

    task: str
    step: int
    reward: float
    top_share: float  # of sum A^2 w, held by 1% of the responses
    eff: dict[str, Value]  # gamma -> gain
    cos: dict[str, Value]
    noise: dict[str, dict[str, Value]]  # baseline and share of the tokens -> rule -> noise relative to all tokens
    tokens: dict[str, dict[str, float]]  # the same -> rule -> tokens in the pass, as a share


def draw(policy: ToyPolicy, task: Task, rows: Sequence[Row], size: int, seed: int) -> Responses:
    """Draw n = `size` responses to each row."""
    generator, longest = torch.Generator().manual_seed(seed), task.max_response_tokens
    drawn, rewards, products = [], [], []
    for row in rows:
        samples = policy.sample([policy.encode(row.question)], longest, generator, copies=size)
        scores = torch.tensor(score_batch(policy, task, [row] * size, samples), dtype=torch.float64)
        drawn.append(samples)
        rewards.append(task.scale * scores + task.shift)
        products.append(token_products(policy, samples, longest).double().diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    r, own = torch.stack(rewards), torch.stack(products)
    w = own.sum((-2, -1))
    lengths = torch.tensor([[len(sample.tokens) for sample in samples] for samples in drawn])

    def values_of(baseline: str) -> Tensor:
        weights = w if baseline == "pooled" else torch.ones_like(w)
        pooled = sum_of_others((weights * r).sum(-1)) / sum_of_others(weights.sum(-1))
        return advantages(baseline, r, w, lengths, replace(NO_HISTORY, expected=pooled))

    plain = values_of("pooled")
    values = torch.stack([plain * tempering(w, float(w.mean()), power) for power in POWERS])
    means = [(values[:, q].float() / size) @ policy.scores(samples) for q, samples in enumerate(drawn)]
    return Responses(
        advantages=values,
        norms_sq=w,
        products=own,
        sampled=torch.stack([sampled_energies([sample.logprobs for sample in samples]) for samples in drawn]),
        lengths=lengths,
        tokens=torch.tensor([[len(s.prompt) + len(s.tokens) - 1 for s in samples] for samples in drawn]),
        gradients=torch.stack(means, 1),
        thinned={baseline: values_of(baseline) for baseline in THINNED},
        reward=float(r.mean()),
    )


class Resampled:
    """Means over prompts and over pairs of different prompts: of all, then of each bootstrap resample.

    Args:
        num_prompts: Q.
        seed: of the resamples.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        picks = np.random.default_rng(seed).multinomial(num_prompts, [1 / num_prompts] * num_prompts, BOOTSTRAPS)
        self.counts = torch.cat([torch.ones(1, num_prompts), torch.from_numpy(picks)]).double()
        """[1 + B, Q]: how often each prompt is in a resample."""

    def mean(self, values: Tensor) -> Tensor:
        """Of values [Q]: [1 + B]."""
        return self.counts @ values / self.counts.sum(-1)

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """<E x, E y> from rows [Q, P] of x and y: [1 + B]."""
        products, counts = left.double() @ right.double().T, self.counts
        same = counts.square()
        sums = ((counts @ products) * counts).sum(-1) - same @ products.diagonal()
        return sums / (counts.sum(-1).square() - same.sum(-1))


def tempered(responses: Responses, resampled: Resampled) -> tuple[dict[str, Value], dict[str, Value]]:
    """(eff, cos) by gamma."""
    eff, cos = {}, {}
    plain = responses.gradients[0]
    signal = resampled.pairs(plain, plain)
    reference = torch.ones(())
    for power, values, rows in zip(POWERS, responses.advantages, responses.gradients, strict=True):
        own, cross = resampled.pairs(rows, rows), resampled.pairs(rows, plain)
        second = resampled.mean((values.square() * responses.norms_sq).mean(-1))
        gain = cross.square() / (second - own)
        reference = gain if power == 0 else reference
        eff[f"{power:g}"] = value_of(gain / reference)
        cos[f"{power:g}"] = value_of(cross / (own * signal).sqrt())
    return eff, cos


def value_of(values: Tensor) -> Value:
    """The first value, with the interval of the others; resamples without a value are left out."""
    low, high = np.nanquantile(values[1:].numpy(), [0.025, 0.975])
    return Value(float(values[0]), float(low), float(high))


def thinned(responses: Responses, baseline: str, keep: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(rule, E||x||^2 [Q, n], tokens in the pass [Q, n]) of every rule at an equal share of the tokens.

    - keep: `algo.keep`; keep, exact w: the same with the response's own norm in place of the sampler's proxy
    - |A|, |A| / sqrt(T): Cost-Aware Learning (arXiv 2604.28020), its proxy alone and its law with the cost T
    - pruning: DPPO (arXiv 2603.04135) as its abstract describes it. Responses with |A| below the step's mean are left
      out at one rate, at most MOST_PRUNED; the others of them count 1 / (1 - rate)
    - uniform: every response alike
    - tokens, prefixes: NAT (arXiv 2603.06619), tokens at random and prefixes of random length. Response tokens alone
      count here, in NAT's favour: the pass goes through the prompt and, at random, through all tokens' forward
    """
    size, w = responses.thinned[baseline].abs(), responses.norms_sq
    tokens, lengths, second = responses.tokens, responses.lengths, size.square() * w
    cost = tokens.double()
    rules = {
        "keep": size * (responses.sampled / cost).sqrt(),
        "keep, exact w": size * (w / cost).sqrt(),
        "\\|A\\|": size,
        "\\|A\\| / sqrt(T)": size / cost.sqrt(),
        "uniform": torch.ones_like(size),
    }
    for name, values in rules.items():
        columns = zip(values.split(1, 1), tokens.split(1, 1), strict=True)  # a step has one response to each prompt
        probabilities = torch.cat([inclusion(own, cost_of, keep) for own, cost_of in columns], 1)
        yield name, second / probabilities, cost * probabilities
    probabilities = pruning(size, cost, keep)
    yield "pruning (DPPO)", second / probabilities, cost * probabilities
    squares = responses.products.diagonal(dim1=-2, dim2=-1).sum(-1)
    yield "tokens (NAT)", size.square() * (w + (1 / keep - 1) * squares), cost * keep
    places = torch.arange(responses.products.shape[-1])
    chance = (2 * keep * (lengths[..., None] - places) / (lengths[..., None] + 1)).clamp(max=1)  # that a prefix has t
    earlier = torch.minimum(places[:, None], places)
    inverse = torch.where(places < lengths[..., None], 1 / chance, 0.0)
    yield "prefixes (NAT)", size.square() * (responses.products * inverse[..., earlier]).sum((-2, -1)), cost * keep


def pruning(size: Tensor, cost: Tensor, keep: float) -> Tensor:
    """pi [Q, n] of DPPO's pruning by |A|, for each column."""
    low = size < size.mean(0)
    rate = (1 - keep) * cost.sum(0) / (cost * low).sum(0).clamp(min=1e-9)
    return torch.where(low, 1 - rate.clamp(max=MOST_PRUNED), 1.0)


def point_of(task: Task, step: int, responses: Responses, seed: int) -> Point:
    """All values of a policy."""
    resampled = Resampled(len(responses.norms_sq), seed)
    eff, cos = tempered(responses, resampled)
    plain = responses.gradients[0]
    signal = resampled.pairs(plain, plain)
    noise: dict[str, dict[str, Value]] = {}
    tokens: dict[str, dict[str, float]] = {}
    for baseline, values in responses.thinned.items():
        whole = resampled.mean((values.square() * responses.norms_sq).mean(-1)) - signal
        for keep in SHARES:
            case, found = f"{baseline}, keep {keep:g}", list(thinned(responses, baseline, keep))
            noise[case] = {
                rule: value_of((resampled.mean(second.mean(-1)) - signal) / whole) for rule, second, _ in found
            }
            tokens[case] = {rule: float(used.sum() / responses.tokens.sum()) for rule, _, used in found}
    energy = responses.advantages[0].square() * responses.norms_sq
    top = energy.flatten().topk(max(1, energy.numel() // 100)).values
    return Point(task.name, step, responses.reward, float(top.sum() / energy.sum()), eff, cos, noise, tokens)


def path(config: ToyConfig, at: Sequence[int]) -> Iterator[tuple[int, ToyRun]]:
    """Train a run and yield (step, run) at the given steps; step 0 is before training."""
    toy, done = ToyRun(config), 0
    for target in sorted(at):
        while done < target:
            toy.step(done)
            done += 1
        yield done, toy


def run(options: argparse.Namespace) -> int:
    """Measure; write reweighting.json, and print and write the tables asked for.

    Raises:
        UserError: a task does not exist.
    """
    from oblr_megatron.observe.console import progress

    tasks, points = [task_named(name) for name in options.tasks], []
    torch.set_num_threads(1)
    with progress("reweighting", len(tasks) * len(options.steps)) as advance:
        for task in tasks:
            config = ToyConfig(
                task=task.name,
                start_dir=prepare(task.name, "low", options.out / "starts"),
                run_dir=options.out,
                seed=options.seed,
                num_steps=max(1, *options.steps),
                num_prompts=64,
                group_size=1,
                algo=AlgoConfig(baseline="pooled", schedule="constant"),
                optimizer=OptimizerConfig(lr=options.lr),
            )
            rows = task.rows()[0][: options.prompts]
            for step, toy in path(config, options.steps):
                responses = draw(toy.policy, task, rows, options.pool, options.seed)
                points.append(point_of(task, step, responses, options.seed))
                advance(1)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reweighting.json").write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    for wanted, name, table in (
        (options.tempering, "tempering", tempering_table),
        (options.thinning, "thinning", thinning_table),
    ):
        if wanted:
            (options.out / f"{name}.md").write_text(table(points), encoding="utf-8")
            print(table(points))
    return EXIT_OK


def tempering_table(points: Sequence[Point]) -> str:
    """One line per point, one column per gamma above 0."""
    powers = [f"{power:g}" for power in POWERS[1:]]
    head = ["task, step", "reward", "top 1%", *(f"gamma = {power}: eff (cos)" for power in powers)]
    lines = [
        "eff: samples that a step without tempering needs for the same gain, over those with it, where noise is large.",
        "cos: cosine of the expected gradient with the true one. [95% interval over prompts]\n",
        f"| {' | '.join(head)} |",
        "|---|" + "---:|" * (len(head) - 1),
    ]
    for point in points:
        cells = [f"{point.eff[power]} ({point.cos[power].value:.2f})" for power in powers]
        lines.append(
            f"| {point.task} {point.step} | {point.reward:.2f} | {point.top_share:.0%} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def thinning_table(points: Sequence[Point]) -> str:
    """One block per baseline and share of the tokens; one line per point, one column per rule."""
    lines = ["Noise over that of the gradient of all tokens; in brackets the tokens, where a rule misses the share."]
    for case, first in points[0].noise.items():
        share = float(case.split()[-1])
        lines += [f"\n| task, step; {case} | {' | '.join(first)} |", "|---|" + "---:|" * len(first)]
        for point in points:
            cells = []
            for rule, value in point.noise[case].items():
                used = point.tokens[case][rule]
                cells.append(f"{value.value:.2f}" + (f" ({used:.2f})" if abs(used - share) > 0.005 else ""))
            lines.append(f"| {point.task} {point.step} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
