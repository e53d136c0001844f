"""The variance study's second moments against loops and against exact enumeration for a four-action policy."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from oblr_megatron.cli import main
from oblr_megatron.errors import EXIT_USER
from studies.variance import ORACLE, Pool, cells, deals, measure, moments, names_for, pooled_values
from studies.variance_report import document

ACTIONS = 4


def bandit_pool(num_prompts: int, size: int, seed: int) -> tuple[Pool, torch.Tensor, torch.Tensor]:
    """(pool, pi, rewards) of one-token responses. The parameters are the logits of a softmax: s = e_a - pi."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 0.2, 1.0], dtype=torch.float64)
    actions = torch.multinomial(probabilities, num_prompts * size, replacement=True, generator=generator)
    scores = torch.eye(ACTIONS, dtype=torch.float64)[actions] - probabilities
    scores = scores.view(num_prompts, size, ACTIONS)
    products = torch.einsum("qip,qjp->qij", scores, scores)
    above = rewards[actions].view(num_prompts, size)
    above = above - above.mean(-1, keepdim=True)
    pool = Pool(
        rewards=rewards[actions].view(num_prompts, size),
        lengths=torch.ones(num_prompts, size, dtype=torch.int64),
        products=products[:, :, None, :, None].float(),
        energies=products.diagonal(dim1=1, dim2=2)[..., None],
        gradients=torch.einsum("qi,qia->qa", above / (size - 1), scores),
    )
    return pool, probabilities, rewards


def exact(probabilities: torch.Tensor, rewards: torch.Tensor, baseline: str) -> tuple[float, float]:
    """(E||g||^2, ||E g||^2) of a group of two, over all pairs of actions."""
    scores = torch.eye(ACTIONS, dtype=torch.float64) - probabilities
    second, mean = 0.0, torch.zeros(ACTIONS, dtype=torch.float64)
    for a, b in itertools.product(range(ACTIONS), repeat=2):
        chance = float(probabilities[a] * probabilities[b])
        first, other = rewards[a], rewards[b]
        if baseline != "none":  # the other's reward, or the mean of both
            share = 1.0 if baseline == "rloo" else 0.5
            first, other = share * (first - other), share * (other - first)
        g = (first * scores[a] + other * scores[b]) / 2
        second += chance * float(g @ g)
        mean += chance * g
    return second, float(mean @ mean)


@pytest.mark.parametrize("baseline", ["none", "rloo", "group_mean"])
def test_moments_equal_the_enumeration_of_all_pairs(baseline: str) -> None:
    """60 pools of 64 responses; the tolerance is four standard errors of the estimates."""
    pool, probabilities, rewards = bandit_pool(60, 64, seed=0)
    found = measure(pool, 2, num_deals=4, seed=0)[baseline]
    expected = exact(probabilities, rewards, baseline)
    for values, truth in zip(found, expected, strict=False):
        error = float(values.std()) / len(values) ** 0.5
        assert abs(float(values.mean()) - truth) < 4 * error
        assert error < 0.2 * truth + 0.01  # otherwise the tolerance is too wide to fail


def test_prompts_with_one_gradient_have_no_part_between_them() -> None:
    """All prompts of the bandit are the same, so ||E_q E g_q||^2 is the signal and `between` is 0 up to noise."""
    pool, probabilities, rewards = bandit_pool(200, 64, seed=5)
    _, signal = exact(probabilities, rewards, "rloo")
    assert pool.mean_sq == pytest.approx(signal, rel=0.1)
    found = measure(pool, 4, num_deals=1, seed=0)
    line = cells("bandit", "low", 4, found, pool.mean_sq, seed=0)[0]
    assert abs(line.between) < 0.1 * signal and line.total == pytest.approx(line.between + line.trace, rel=0.1)


def test_the_noise_between_different_prompts_is_measured() -> None:
    """Half of the prompts have the opposite rewards and so the opposite gradient: all signal lies between prompts."""
    pool, probabilities, rewards = bandit_pool(200, 64, seed=6)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(100)[:, None]
    flipped = replace(pool, rewards=pool.rewards * sign, gradients=pool.gradients * sign)
    _, signal = exact(probabilities, rewards, "rloo")
    assert abs(flipped.mean_sq) < 0.05 * signal
    lines = cells("bandit", "low", 4, measure(flipped, 4, num_deals=1, seed=0), flipped.mean_sq, seed=0)
    assert {line.baseline: line for line in lines}["rloo"].between == pytest.approx(signal, rel=0.1)


def test_a_group_of_one_has_the_baselines_that_read_no_group() -> None:
    pool, _, _ = bandit_pool(30, 32, seed=7)
    names = set(names_for(1))
    assert {"none", "pooled", "pooled_mean", "pooled[logit]", "pooled[tempered]", ORACLE} == names <= set(names_for(2))
    lines = cells("bandit", "low", 1, measure(pool, 1, num_deals=1, seed=0), pool.mean_sq, seed=0)
    assert {line.baseline for line in lines} == names and all(line.ratio is None for line in lines)


def test_a_tempered_gradient_has_its_own_second_moment() -> None:
    pool, _, _ = bandit_pool(8, 16, seed=0)
    found, norms = measure(pool, 1, num_deals=2, seed=1), pool.norms_sq
    centred = pool.rewards - pooled_values(pool, "pooled")[:, None]
    for name, power in (("pooled", 0.0), ("pooled[tempered]", 0.25)):
        second = (centred * (norms.mean() / norms) ** power).square() * norms
        torch.testing.assert_close(found[name][0], second.mean(-1), rtol=1e-6, atol=0)
    assert not torch.allclose(found["pooled[tempered]"], found["pooled"], rtol=1e-3)


def test_pooled_values_leave_the_prompt_out() -> None:
    pool, _, _ = bandit_pool(3, 8, seed=8)
    weights = pool.norms_sq
    expected = (weights[1:] * pool.rewards[1:]).sum() / weights[1:].sum()
    assert float(pooled_values(pool, "pooled")[0]) == pytest.approx(float(expected))
    assert float(pooled_values(pool, "pooled_mean")[0]) == pytest.approx(float(pool.rewards[1:].mean()))


def test_moments_against_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    prompts, size, length, group = 2, 7, 3, 3
    scores = torch.randn(prompts, size, length, 5, generator=generator, dtype=torch.float64)
    products = torch.einsum("qitp,qjup->qitju", scores, scores)
    spread, other = torch.randn(2, prompts, size, length, generator=generator, dtype=torch.float64)
    deal = deals(prompts, size, group, 1, 0)[0]
    found = moments(spread, other, products, deal)
    for q in range(prompts):
        sums = [
            [sum(weights[q, i] @ scores[q, i] for i in members[q].tolist()) for members in deal]
            for weights in (spread, other)
        ]
        own = sum(g @ g for g in sums[0]) / len(deal)
        pairs = list(itertools.permutations(range(len(deal)), 2))
        across = sum(sums[0][k] @ sums[0][m] for k, m in pairs) / len(pairs)
        against = sum(sums[0][k] @ sums[1][m] for k, m in pairs) / len(pairs)
        torch.testing.assert_close(found[:, q], torch.stack([own, across, against]))


def test_deals_are_disjoint_groups() -> None:
    for deal in deals(3, 10, 4, 2, 0):
        assert deal.shape == (2, 3, 4)
        assert all(len(set(deal[:, q].flatten().tolist())) == 8 for q in range(3))


def test_the_table_has_every_baseline_and_intervals_contain_their_values() -> None:
    pool, _, _ = bandit_pool(30, 32, seed=2)
    lines = cells("bandit", "low", 4, measure(pool, 4, num_deals=2, seed=0), pool.mean_sq, seed=0)
    by_name = {line.baseline: line for line in lines}
    assert by_name["rloo"].ratio == 1.0 and by_name["optimal"].ratio > by_name[ORACLE].ratio
    assert all(line.low <= line.ratio <= line.high for line in lines)
    text = document(lines)
    assert all(f"| {name} |" in text for name in by_name)


def test_a_finished_study_only_rewrites_its_table_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both come from variance.json. Nothing is measured, so no start is made."""
    pool, _, _ = bandit_pool(20, 16, seed=3)
    lines = [
        line
        for size in (1, 2, 4)
        for line in cells("sums", "low", size, measure(pool, size, num_deals=1, seed=0), pool.mean_sq, 0)
    ]
    settings = {"group_sizes": [1, 2, 4], "prompts": 64, "pool": 64, "deals": 8, "seed": 0}
    file, command = tmp_path / "variance.json", ["study", "variance", "--out", str(tmp_path), "--tasks", "sums"]
    command += ["--skills", "low", "--group-sizes", "1", "2", "4"]
    file.write_text(json.dumps({"settings": settings, "cells": [asdict(line) for line in lines]}))
    assert main(command) == 0
    assert "| james_stein |" in capsys.readouterr().out and "G = 4" in (tmp_path / "variance.md").read_text()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".svg", ".png"}

    assert main([*command, "--pool", "32"]) == EXIT_USER
    error = capsys.readouterr().err
    assert "its cells were measured with pool 64, not 32" in error and str(file) in error and error.count("\n") == 1
    file.write_text(file.read_text()[:-9])
    assert main(command) == EXIT_USER
    assert "not a file of this study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--group-sizes", "2", "64"], "--pool 64 has fewer than two groups of 64"),
        (["--group-sizes", "33"], "fewer than two groups of 33"),
        (["--group-sizes", "0"], "'0' is not a whole number"),
        (["--deals", "0"], "'0' is not a whole number"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "variance", "--out", str(tmp_path / "out"), *options]) == EXIT_USER
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_pool_of_two_groups_measures_the_signal() -> None:
    """The smallest pool that is not refused."""
    pool, _, _ = bandit_pool(20, 16, seed=3)
    assert all(found.isfinite().all() for found in measure(pool, 8, num_deals=1, seed=0).values())
