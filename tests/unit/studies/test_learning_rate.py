"""The study of Theorem 4's learning rate: its parts against closed forms, and a small study from path to table.

Not covered: whether the theorem holds; that is the study's result.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from oblr_megatron.algo.loss import sample_coefficients
from oblr_megatron.cli import main
from oblr_megatron.errors import EXIT_OK, EXIT_USER
from studies import learning_rate
from studies.learning_rate import Gain, Line, Search, measure, moments, peak, peak_interval, shrink
from studies.learning_rate_report import document, kept
from studies.start import load, prepare
from studies.tasks import TASKS
from studies.toy_trainer import score_batch

TASK, G = TASKS["brackets"], 4
RATES = tuple(1e-3 * 1.5**n for n in range(12))
SEARCH = Search(group_size=G, batch_sizes=(2, 8), max_batches=3, objective=16, repeats=2, rates=RATES[::3])


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return prepare(TASK.name, "high", tmp_path_factory.mktemp("start"), steps=120)


def line(**values) -> Line:
    whole = {
        "task": "sums",
        "skill": "low",
        "step": 0,
        "num_prompts": 4,
        "batches": 2,
        "signal": 1.0,
        "noise": 12.0,
        "shrink": 0.25,
        "inverse_c": 0.08,
        "best": 0.02,
        "low": 0.01,
        "high": 0.04,
        "rates": [0.01, 0.02, 0.04],
        "gains": [0.5, 1.0, 0.0],
    }
    return Line(**whole | values)


def test_moments_are_unbiased():
    generator = torch.Generator().manual_seed(0)
    truth = torch.tensor([0.3, -0.4, 0.0])  # ||.||^2 = 0.25, below the noise of a mean of 8
    drawn = truth + torch.randn(4000, 8, 3, generator=generator)
    signal, noise = np.mean([moments(each) for each in drawn], axis=0)
    assert signal == pytest.approx(0.25, abs=0.03) and noise == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("num_prompts", [4, 64])
def test_the_bound_is_highest_at_the_predicted_rate(num_prompts):
    signal, noise, c = 2.0, 50.0, 40.0
    rates = np.array(RATES)
    gains = rates * signal - c / 2 * rates**2 * (signal + noise / num_prompts)
    assert peak(RATES, gains) == pytest.approx(shrink(signal, noise, num_prompts) / c, rel=0.1)


def test_the_peak_of_a_parabola_in_log_eta_is_exact_and_a_monotone_curve_peaks_at_the_edge():
    assert peak(RATES, -((np.log(RATES) - np.log(0.0123)) ** 2)) == pytest.approx(0.0123, rel=1e-9)
    assert peak(RATES, np.arange(12.0)) == RATES[-1]
    low, high = peak_interval(RATES, np.stack([-((np.log(RATES) - np.log(rate)) ** 2) for rate in (0.006, 0.02)]))
    assert low == pytest.approx(0.006) and high == pytest.approx(0.02)


def test_the_mean_of_prompt_gradients_is_rloos_estimate(start):
    policy, rows = load(start, TASK), TASK.rows()[0][:20]  # more than one pass
    found = learning_rate.prompt_gradients(policy, TASK, rows, G, seed=5)
    generator, asked = torch.Generator().manual_seed(5), [row for row in rows for _ in range(G)]
    half = learning_rate.AT_ONCE * G
    samples = [
        sample
        for part in (asked[:half], asked[half:])
        for sample in policy.sample([policy.encode(row.question) for row in part], TASK.max_response_tokens, generator)
    ]
    rewards = torch.tensor(score_batch(policy, TASK, asked, samples)).double().view(-1, G)
    values = rewards - (rewards.sum(-1, keepdim=True) - rewards) / (G - 1)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    want = policy.gradient(samples, sample_coefficients(values.flatten(), lengths, len(rows), G))
    assert float((found.mean(0) - want).norm() / want.norm()) < 1e-4


def test_gain_is_zero_along_zero_and_the_policy_is_restored(start):
    policy = load(start, TASK)
    gain, before = Gain(policy, TASK, TASK.rows()[0][:16], SEARCH), policy.vector()
    assert (gain.curve(torch.zeros_like(before)) == 0).all()
    wild = gain.curve(torch.randn(len(before), generator=torch.Generator().manual_seed(0)) * 1e3)
    assert wild.min() < learning_rate.LOST and policy.vector().equal(before)


def test_a_point_without_signal_has_no_lines(start):
    policy, rows = load(start, TASK), TASK.rows()[0][:24]
    with torch.no_grad():
        policy.assign(torch.zeros_like(policy.vector()))  # all logits are 0 for any embedding, so the gradient is 0
    assert measure(policy, TASK, rows, SEARCH, skill="low", step=0) == []


def test_too_few_prompts_are_refused(tmp_path):
    options = ["--out", str(tmp_path), "--prompts", "8", "--batch-sizes", "4", "8"]
    assert main(["study", "learning_rate", *options]) == EXIT_USER


def test_share_of_the_gain_that_rules_keep():
    first, later = line(), line(step=9, best=0.01, inverse_c=0.16, gains=[1.0, 0.5, -1.0])
    assert kept(first, [first, later]) == pytest.approx({"local": 1.0, "shrink": 1.0, "constant": 1.0})
    assert kept(later, [first, later]) == pytest.approx({"local": -1.0, "shrink": 0.5, "constant": 0.5})
    lost = line(gains=[-0.1, -0.2, -0.3], best=0.01)
    assert all(np.isnan(share) for share in kept(lost, [first, lost]).values())
    assert "| – | – | – |" in document([lost])  # noqa: RUF001
    assert "| 9 | 4 |" in document([first, later]) and "-100% | 50% | 50% |" in document([first, later])


def test_a_small_study_writes_its_files(start, tmp_path, monkeypatch, capsys):
    """Each point has lines or is reported as having no signal; with so few prompts both can happen."""
    monkeypatch.setattr(learning_rate, "prepare", lambda task, skill, directory: start)
    monkeypatch.setattr(learning_rate, "RATES", learning_rate.RATES[::4])
    options = ["--tasks", "brackets", "--points", "0", "2", "--batch-sizes", "2", "--batches", "2"]
    options += ["--prompts", "64", "--objective", "64", "--repeats", "2", "--out", str(tmp_path)]
    assert main(["study", "learning_rate", *options]) == EXIT_OK
    lines = [Line(**each) for each in json.loads((tmp_path / "learning_rate.json").read_text())]
    left_out = re.findall(r"step (\d): no signal", capsys.readouterr().out)
    assert sorted([*(each.step for each in lines), *map(int, left_out)]) == [0, 2] and lines
    assert {(each.num_prompts, each.batches) for each in lines} == {(2, 2)}
    for each in lines:
        assert 0 < each.shrink < 1 and each.predicted < each.inverse_c and each.low <= each.high
    assert len({each.signal for each in lines}) == len(lines), "every point has another policy"
    for kind in ("md", "svg", "png"):
        assert (tmp_path / f"learning_rate.{kind}").stat().st_size > 500
