"""Tempering and thinning at a fixed policy: against loops, and against the enumeration of masks and of a bandit.

Not covered: the figures of the tasks (docs/evidence.md), the run along which they are measured (test_toy_trainer.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from studies.policy import ToyPolicy
from studies.reweighting import (
    POWERS,
    Point,
    Resampled,
    Responses,
    draw,
    point_of,
    pruning,
    tempered,
    tempering_table,
    thinned,
    thinning_table,
)
from studies.start import build_model
from studies.tasks import TASKS

CHAIN = TASKS["chain"]


def responses_of(advantages: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor) -> Responses:
    """Responses with advantages [Q, n] and token scores [Q, n, T, P]; prompts have 3 tokens."""
    norms = scores.sum(2).square().sum(-1)
    values = torch.stack([advantages * (norms.mean() / norms) ** power for power in POWERS])
    gradients = torch.einsum("kqi,qip->kqp", values, scores.sum(2)) / advantages.shape[1]
    return Responses(
        advantages=values,
        norms_sq=norms,
        products=torch.einsum("qitp,qiup->qitu", scores, scores),
        sampled=norms,
        lengths=lengths,
        tokens=lengths + 3,
        gradients=gradients.float(),
        thinned={"pooled": advantages, "pooled_mean": advantages + 0.1},
        reward=0.5,
    )


def random_responses(num_prompts: int, size: int) -> tuple[Responses, torch.Tensor, torch.Tensor]:
    """(responses, advantages [Q, n], token scores [Q, n, 3, 5]) of 1 to 3 tokens."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(num_prompts, size, 3, 5, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 4, (num_prompts, size), generator=generator)
    scores[torch.arange(3) >= lengths[..., None]] = 0.0
    advantages = torch.rand(num_prompts, size, generator=generator, dtype=torch.float64) - 0.4
    return responses_of(advantages, scores, lengths), advantages, scores


def bandit(num_prompts: int, size: int) -> tuple[Responses, dict[float, tuple[float, float]]]:
    """One-token responses of a softmax policy, and (eff, cos) by gamma from its four actions."""
    generator = torch.Generator().manual_seed(0)
    pi = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    above = torch.tensor([0.0, 1.0, 0.2, 1.0], dtype=torch.float64) - 0.4
    rows = torch.eye(4, dtype=torch.float64) - pi
    w = rows.square().sum(-1)
    actions = torch.multinomial(pi, num_prompts * size, replacement=True, generator=generator).view(num_prompts, size)
    mu = (pi * above) @ rows
    exact: dict[float, tuple[float, float]] = {}
    reference = 1.0
    for power in POWERS:
        c = above * w**-power
        mean, second = (pi * c) @ rows, float((pi * c.square() * w).sum())
        gain = float(mean @ mu) ** 2 / (second - float(mean @ mean))
        reference = gain if power == 0 else reference
        exact[power] = gain / reference, float(mean @ mu / (mean.norm() * mu.norm()))
    lengths = torch.ones(num_prompts, size, dtype=torch.int64)
    return responses_of(above[actions], rows[actions][:, :, None], lengths), exact


def test_eff_and_cos_are_those_of_the_enumeration() -> None:
    responses, exact = bandit(300, 64)
    eff, cos = tempered(responses, Resampled(300, seed=0))
    for power in POWERS[1:]:
        found = eff[f"{power:g}"], cos[f"{power:g}"]
        for value, want in zip(found, exact[power], strict=True):
            assert value.low <= value.value <= value.high
            assert abs(value.value - want) < value.high - value.low < 0.1, "four standard errors"
    assert eff["0"].value == 1 and cos["0"].value == pytest.approx(1)
    assert abs(exact[0.5][0] - 1) > 0.1, "otherwise every formula passes"


def test_pairs_leave_out_a_prompt_with_itself_and_with_its_copies() -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(2, 4, 3, generator=generator)
    resampled = Resampled(4, seed=0)
    for counts, found in itertools.islice(zip(resampled.counts.tolist(), resampled.pairs(left, right), strict=True), 5):
        drawn = [q for q, count in enumerate(counts) for _ in range(int(count))]
        products = [float(left[a] @ right[b]) for a in drawn for b in drawn if a != b]
        assert len(drawn) == 4 and float(found) == pytest.approx(sum(products) / len(products), rel=1e-5)


def masks(length: int, keep: float, rule: str) -> Iterator[tuple[float, list[float]]]:
    """(probability, weights of the tokens) of every outcome of NAT's two rules."""
    if rule == "tokens (NAT)":
        for kept in itertools.product((0, 1), repeat=length):
            yield keep ** sum(kept) * (1 - keep) ** (length - sum(kept)), [own / keep for own in kept]
        return
    chances = [2 * keep * (length - place) / (length + 1) for place in range(length)]
    for end in range(length + 1):  # tokens of the prefix
        above = chances[end - 1] if end else 1.0
        below = chances[end] if end < length else 0.0
        yield above - below, [1 / chances[place] if place < end else 0.0 for place in range(length)]


@pytest.mark.parametrize("keep", [0.5, 0.25])
@pytest.mark.parametrize("rule", ["tokens (NAT)", "prefixes (NAT)"])
def test_the_second_moments_of_token_rules_are_those_of_all_outcomes(rule: str, keep: float) -> None:
    """The rules are unbiased, keep the share of the tokens, and have this E||x||^2."""
    responses, advantages, scores = random_responses(2, 3)
    second = {name: moment for name, moment, _ in thinned(responses, "pooled", keep)}[rule]
    for q, i in itertools.product(range(2), range(3)):
        length = int(responses.lengths[q, i])
        own, mean, wanted, tokens = scores[q, i, :length] * advantages[q, i], torch.zeros(5).double(), 0.0, 0.0
        for chance, weights in masks(length, keep, rule):
            x = torch.tensor(weights, dtype=torch.float64) @ own
            mean, wanted = mean + chance * x, wanted + chance * float(x @ x)
            tokens += chance * sum(weight > 0 for weight in weights)
        torch.testing.assert_close(mean, own.sum(0))
        assert tokens == pytest.approx(keep * length) and float(second[q, i]) == pytest.approx(wanted)


@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_rules_of_responses_keep_the_share_and_the_best_one_wins(keep: float) -> None:
    """Each step, a column, has the share of its tokens. pi ~ |A| sqrt(w / T) has the least noise but for its floor."""
    responses, advantages, _ = random_responses(40, 3)
    energy, noise = advantages.square() * responses.norms_sq, {}
    for rule, second, used in thinned(responses, "pooled", keep):
        if "NAT" not in rule:
            torch.testing.assert_close(second * used, energy * responses.tokens)  # pi T over pi
        if "NAT" not in rule and "DPPO" not in rule:
            noise[rule] = float(second.mean())
            torch.testing.assert_close(used.sum(0), keep * responses.tokens.sum(0).double())
    assert noise["keep, exact w"] < 1.02 * min(noise.values()) and noise["uniform"] == pytest.approx(
        float(energy.mean()) / keep
    )


def test_pruning_leaves_out_responses_with_small_advantages_alone() -> None:
    """Responses above the mean stay. The others' rate gives the share, and stops at its largest published value."""
    size = torch.tensor([[0.1], [0.2], [0.9], [0.8]], dtype=torch.float64)
    cost = torch.tensor([[10.0], [30.0], [10.0], [10.0]], dtype=torch.float64)
    pi = pruning(size, cost, 0.5)
    torch.testing.assert_close(pi[:, 0], torch.tensor([0.25, 0.25, 1.0, 1.0], dtype=torch.float64))
    assert float((pi * cost).sum() / cost.sum()) == pytest.approx(0.5)
    torch.testing.assert_close(pruning(size, cost, 0.25)[:2], torch.full((2, 1), 0.1, dtype=torch.float64))


def test_responses_have_the_policys_scores() -> None:
    policy = ToyPolicy(build_model(CHAIN), CHAIN.characters)
    rows = CHAIN.rows()[0][:3]
    responses = draw(policy, CHAIN, rows, 4, seed=5)
    generator = torch.Generator().manual_seed(5)
    for q, row in enumerate(rows):
        samples = policy.sample([policy.encode(row.question)], CHAIN.max_response_tokens, generator, copies=4)
        scores = policy.scores(samples)
        torch.testing.assert_close(responses.norms_sq[q].float(), scores.square().sum(-1), rtol=1e-3, atol=0)
        for k in range(len(POWERS)):
            torch.testing.assert_close(responses.gradients[k, q], responses.advantages[k, q].float() @ scores / 4)
        assert responses.tokens[q].tolist() == [len(each.prompt) + len(each.tokens) - 1 for each in samples]
    factor = (responses.norms_sq.mean() / responses.norms_sq) ** 0.25
    torch.testing.assert_close(responses.advantages[2], responses.advantages[0] * factor)
    torch.testing.assert_close(responses.thinned["pooled"], responses.advantages[0])


def test_the_tables_have_every_gamma_and_rule() -> None:
    responses, *_ = random_responses(20, 3)
    point: Point = point_of(CHAIN, 10, responses, seed=0)
    assert "gamma = 0.375" in tempering_table([point]) and "| chain 10 | 0.50 |" in tempering_table([point])
    text = thinning_table([point])
    assert text.count("| chain 10 |") == len(point.noise) == 4
    for case, rules in point.noise.items():
        assert case in text and all(f"| {rule} |" in text for rule in rules)
    assert point.noise["pooled, keep 0.5"] != point.noise["pooled_mean, keep 0.5"]
