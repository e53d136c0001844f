"""`snr/between` and `snr/within` of a run at a fixed policy against a direct measurement, on two tasks.

The run's rate is too small to move the policy. The direct measurement draws many responses to each prompt and computes
both parts from their definitions. tests/unit/algo/test_noise_split.py enumerates a policy exactly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from studies.start import prepare
from studies.tasks import TASKS
from studies.toy_trainer import ToyConfig, ToyRun, score_batch

PROMPTS, AT_ONCE, RESPONSES, STEPS, Q, G = 256, 16, 16, 60, 32, 4


Measured = tuple[float, float]  # a mean and its standard error


def mean_of(values: torch.Tensor) -> Measured:
    return float(values.mean()), float(values.std()) / len(values) ** 0.5


def measured(run: ToyRun) -> tuple[Measured, Measured]:
    """(between, within of rloo at G) of g_q = 1/G sum (r - b) s over training prompts.

    ||E g_q||^2 is the inner product of estimates from two halves of a prompt's responses. E||g_q||^2 is the mean over
    disjoint groups of G.
    """
    generator, policy, task = torch.Generator().manual_seed(99), run.policy, run.task
    signal, second, whole = [], [], []
    for first in range(-PROMPTS, 0, AT_ONCE):
        rows = run.train[first : first + AT_ONCE or None]
        prompts = [policy.encode(row.question) for row in rows]
        samples = policy.sample(prompts, task.max_response_tokens, generator, copies=RESPONSES)
        asked = [row for row in rows for _ in range(RESPONSES)]
        rewards = torch.tensor(score_batch(policy, task, asked, samples)).view(AT_ONCE, RESPONSES)
        for own, scores in zip(rewards, policy.scores(samples).view(AT_ONCE, RESPONSES, -1), strict=True):  # [n, P]
            halves = [_rloo(own[half], scores[half]) for half in (slice(None, None, 2), slice(1, None, 2))]
            signal.append(float(halves[0] @ halves[1]))
            groups = [_rloo(own[at : at + G], scores[at : at + G]) for at in range(0, RESPONSES, G)]
            second.append(sum(float(group @ group) for group in groups) / len(groups))
            whole.append(_rloo(own, scores))
    found = torch.stack(whole).double()
    mean_sq = float((found.sum(0).square().sum() - found.square().sum()) / (PROMPTS * (PROMPTS - 1)))
    within = torch.tensor(second) - torch.tensor(signal)
    return mean_of(torch.tensor(signal) - mean_sq), mean_of(within)


def _rloo(rewards: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """[P]: the gradient of one group."""
    return (rewards - rewards.mean()) / (len(rewards) - 1) @ scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", pytest.param("brackets", marks=pytest.mark.nightly)])
def test_the_split_of_a_run_is_the_measured_one(name: str, tmp_path: Path) -> None:
    start = prepare(name, "high", tmp_path / "start", steps=500)
    config = ToyConfig.model_validate(
        {
            "task": name,
            "start_dir": start,
            "run_dir": tmp_path / "run",
            "num_steps": STEPS,
            "num_prompts": Q,
            "group_size": G,
            "optimizer": {"lr": 1e-12, "name": "sgd"},
            "algo": {"baseline": "rloo", "snr": {"horizon": 1e6, "num_folds": 8}},  # a plain mean over steps
        }
    )
    run = ToyRun(config)
    before = run.policy.vector()
    records = [run.step(step) for step in range(STEPS)]
    torch.testing.assert_close(run.policy.vector(), before, atol=1e-6, rtol=0)
    unit = TASKS[name].max_response_tokens ** 2  # algo.token_scale, squared
    for part, (truth, error), most in zip(("between", "within"), measured(run), (0.35, 0.15), strict=True):
        sums = torch.tensor([0.0, *((step + 1) * record[f"snr/{part}"] for step, record in enumerate(records))])
        found, spread = mean_of(sums.diff() * unit)  # the metric is a mean over steps so far
        print(f"{name} {part}: from the log {found:.1f} +- {spread:.1f}, measured {truth:.1f} +- {error:.1f}")
        assert (error**2 + spread**2) ** 0.5 < most * truth, "too noisy to tell anything"
        assert abs(found - truth) < 3 * (error**2 + spread**2) ** 0.5
