"""The rivals against their published equations, one response at a time, and a run of each.

Not covered: otb (test_token_baseline.py).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.metrics import read_metrics
from studies.plan import Arm
from studies.policy import Drawn, ToyPolicy
from studies.rivals import RIVALS, Rival, Spo, Step
from studies.start import build_model
from studies.tasks import TASKS
from studies.toy_trainer import ToyConfig, ToyRun, run_toy

Q, G, T, ROWS = 5, 4, 6, 12
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
GRPO_EPS = 1e-6


def step_of(seed: int, group_size: int = G) -> Step:
    """Rewards of 0 and 1; the first group has equal ones."""
    random = torch.Generator().manual_seed(seed)
    rewards = (torch.rand(Q, group_size, generator=random) < 0.5).double()
    rewards[0] = 1.0
    lengths = torch.randint(1, T + 1, (Q, group_size), generator=random)
    weights, count = torch.rand(Q, group_size, generator=random).double() * 9, Q * group_size
    energies, logprobs = torch.rand(count, T, generator=random), -3 * torch.rand(count, T, generator=random)
    prompts = torch.randperm(ROWS, generator=random)[:Q].tolist()
    samples = [Drawn((3,), (4,) * int(length), ()) for length in lengths.flatten()]
    return Step(prompts, samples, rewards, weights, lengths, energies, logprobs)


def built(name: str, seed: int = 0) -> Rival:
    return RIVALS[name](ROWS, seed)


def groups(step: Step) -> list[tuple[list[float], list[float]]]:
    """(rewards, weights) of each group."""
    return list(zip(step.rewards.tolist(), step.weights.tolist(), strict=True))


def grpo(rewards: list[float]) -> list[float]:
    spread = statistics.stdev(rewards) + GRPO_EPS
    return [(reward - statistics.fmean(rewards)) / spread for reward in rewards]


@pytest.mark.parametrize("seed", range(3))
def test_opob_is_vcpos_sum_of_two_gradients(seed: int) -> None:
    """G_R - b G_S with scores R / std and 1 / std, b = sum W R / (sum W + 1e-8), W = w (importance weights are 1)."""
    step, want = step_of(seed), []
    for rewards, weights in groups(step):
        b = sum(w * r for w, r in zip(weights, rewards, strict=True)) / (sum(weights) + 1e-8)
        spread = statistics.pstdev(rewards)
        scale = 1 / spread if spread > 1e-8 else 1.0
        want.append([reward * scale - b * scale for reward in rewards])
    torch.testing.assert_close(built("opob").advantages(step), torch.tensor(want).double(), **CLOSE)


def test_dbb_follows_algorithm_1_over_several_visits() -> None:
    rival, counts = built("dbb"), dict.fromkeys(range(ROWS), (1.0, 1.0))
    policy = tiny()
    for seed in range(4):
        step, want = step_of(seed), []
        for row, (rewards, _) in zip(step.prompts, groups(step), strict=True):
            alpha, beta = counts[row]
            counts[row] = alpha, beta = 0.5 * alpha + sum(rewards), 0.5 * beta + G - sum(rewards)
            variance = alpha * beta / (alpha + beta) ** 2
            want.append([(reward - alpha / (alpha + beta)) / math.sqrt(variance) for reward in rewards])
        torch.testing.assert_close(rival.advantages(step), torch.tensor(want).double(), **CLOSE)
        rival.observe(step, policy)
    assert len({counts[row] for row in counts}) > 4


@pytest.mark.parametrize("seed", range(3))
def test_vl_norm_shares_by_the_inverse_length_over_the_batch(seed: int) -> None:
    step = step_of(seed)
    inverse = [1 / length for length in step.lengths.flatten().tolist()]
    shares = iter([each / statistics.fmean(inverse) for each in inverse])
    want = [[a * next(shares) for a in grpo(rewards)] for rewards, _ in groups(step)]
    torch.testing.assert_close(built("vl_norm").advantages(step), torch.tensor(want).double(), **CLOSE)


def test_advantage_reweighting_lowers_unlikely_tokens() -> None:
    step = step_of(0)
    own = [a for rewards, _ in groups(step) for a in grpo(rewards)]
    want = [[a * (0.2 * math.exp(p) + 0.8) for p in row] for a, row in zip(own, step.logprobs.tolist(), strict=True)]
    torch.testing.assert_close(built("advantage_reweighting").advantages(step), torch.tensor(want).double(), **CLOSE)


def tiny() -> ToyPolicy:
    return ToyPolicy(build_model(TASKS["chain"]).double(), TASKS["chain"].characters)


def own_logprobs(policy: ToyPolicy, sample: Drawn) -> list[float]:
    return policy.logprobs([sample])[0][0].tolist()


def test_spo_follows_the_authors_tracker_prompt_law_and_whitening() -> None:
    """The policy moves between the steps. A prompt that comes again forgets by how far its last response moved."""
    policy, random = tiny(), torch.Generator().manual_seed(0)
    offline = (torch.rand(ROWS, 8, generator=random) < torch.linspace(0, 1, ROWS)[:, None]).double()
    rival = Spo(ROWS, 0)
    rival.begin(lambda count: offline[:, :count])
    counts = {row: [8 * (sum(own) + 0.5) / 9, 8 * (8 - sum(own) + 0.5) / 9] for row, own in enumerate(offline.tolist())}
    last: dict[int, tuple[Drawn, list[float]]] = {}
    forgot = set()
    for number in range(4):
        step = step_of(number, group_size=1)
        rates = [counts[row][0] / sum(counts[row]) for row in step.prompts]
        values = [reward - rate for reward, rate in zip(step.rewards[:, 0].tolist(), rates, strict=True)]
        spread = statistics.stdev(values) + 1e-8
        want = torch.tensor([[(value - statistics.fmean(values)) / spread] for value in values]).double()
        torch.testing.assert_close(rival.advantages(step), want, **CLOSE)
        policy.assign(policy.vector() + 0.001 * torch.randn(policy.num_parameters, generator=random).double())
        for row, sample, reward in zip(step.prompts, step.samples, step.rewards[:, 0].tolist(), strict=True):
            moved = 0.0
            if row in last:
                pairs = zip(last[row][1], own_logprobs(policy, last[row][0]), strict=True)
                moved = statistics.fmean(abs(before - now) for before, now in pairs)
            kept = min(0.96, max(0.875, 2 ** (-moved / 0.06)))
            forgot.add(kept)
            counts[row] = [kept * counts[row][0] + reward, kept * counts[row][1] + 1 - reward]
            last[row] = sample, own_logprobs(policy, sample)
        rival.observe(step, policy)
        found = torch.tensor([counts[row][0] / sum(counts[row]) for row in range(ROWS)]).double()
        torch.testing.assert_close(rival.rates, found, **CLOSE)
    assert len(forgot) > 2, "rho never moved between its bounds"


def test_spo_draws_prompts_by_their_uncertainty() -> None:
    """One prompt a step, 4,000 times: frequencies within five standard deviations of sqrt(p (1 - p)) + 0.05."""
    rival, offline = Spo(ROWS, 0), torch.linspace(0, 1, ROWS).double()[:, None].expand(ROWS, 8)
    rival.begin(lambda count: offline[:, :count])
    weights = (rival.rates * (1 - rival.rates)).sqrt() + 0.05
    want = weights / weights.sum()
    found = torch.tensor([rival.prompts([0])[0] for _ in range(4000)]).bincount(minlength=ROWS) / 4000
    assert ((found - want).abs() < 5 * (want * (1 - want) / 4000).sqrt()).all()
    assert len(set(rival.prompts(list(range(Q))))) == Q


def config_of(start: Path, run_dir: Path, rival: str, **algo: object) -> ToyConfig:
    alone = RIVALS[rival].groups == "one"
    return ToyConfig(
        task="brackets",
        start_dir=start,
        run_dir=run_dir,
        seed=3,
        num_steps=2,
        num_prompts=16 if alone else 4,
        group_size=1 if alone else 4,
        train_rows=64,  # spo samples eight responses to each of them before its first step
        evaluate_every=2,
        evaluation_samples=2,
        rival=rival,
        algo=AlgoConfig.model_validate({"baseline": "none", **algo}),
        optimizer=OptimizerConfig(lr=1e-3),
    )


@pytest.mark.parametrize("rival", RIVALS)
def test_a_run_of_each_is_reproducible_and_its_own(start: Path, tmp_path: Path, rival: str) -> None:
    """Tempering changes the second step, since the first has no mean norm."""

    def norms(name: str, **algo: object) -> list[float]:
        run_toy(config_of(start, tmp_path / name, rival, **algo))
        return [record["grad_norm"] for record in read_metrics(tmp_path / name)[1:]]

    first = norms("a")
    assert first == norms("b") and min(first) > 0
    tempered = norms("c", norm_power=0.25)
    assert tempered[0] == first[0] and tempered[1] != first[1]
    record = read_metrics(tmp_path / "a")[-1]
    assert record["eval/brackets/mean_at_k"] <= record["eval/brackets/pass_at_k"] <= 1


def test_spos_offline_pass_is_of_the_first_policy(start: Path, tmp_path: Path) -> None:
    """Its rates are near those of other samples of the same policy, in the mean over 4,096 prompts."""
    run = ToyRun(config_of(start, tmp_path, "spo").model_copy(update={"train_rows": None}))
    assert isinstance(run.rival, Spo) and len(run.rival.rates) == len(run.train)
    mean = run.offline_rewards(1).mean()
    assert float(run.rival.rates.mean() - (8 * mean + 0.5) / 9) == pytest.approx(0, abs=0.03)


def test_the_plans_names_are_the_rivals() -> None:
    names = Arm.model_json_schema()["properties"]["rival"]["enum"]
    assert names == ["none", *RIVALS] == ToyConfig.model_json_schema()["properties"]["rival"]["enum"]


@pytest.mark.parametrize("name", ["opob", "dbb", "vl_norm", "advantage_reweighting"])
def test_equal_rewards_and_no_norms_are_finite(name: str) -> None:
    step = step_of(0)
    zeros = torch.zeros_like(step.rewards)
    for rewards in (zeros, zeros + 1):
        assert built(name).advantages(replace(step, rewards=rewards, weights=zeros)).isfinite().all()
