"""Coefficients of some prompts are those of all of them, and what is no number is left out. Not covered: baselines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oblr_megatron.algo.advantage import AdvantageRule, running_mean_norm
from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.formulas import History
from oblr_megatron.config import Config, parse_config
from oblr_megatron.types import Scored

Q, G = 3, 4


def config_of(**algo: Any) -> Config:
    sections = {"model": {"path": "unused"}, "data": {"train": "unused"}, "algo": {"snr": {"num_folds": 1}, **algo}}
    return parse_config({"run_dir": "unused", "num_prompts": Q, "group_size": G, **sections})


EARLIER = History(running_mean_norm=0.5)


def step() -> tuple[Scored, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(Q, G, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (Q, G), generator=generator)
    return Scored(rewards, lengths, 0), torch.rand(Q, G, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("power", [0.0, 0.25])
@pytest.mark.parametrize("baseline", ["optimal", "rloo", "opo", "grpo"])
@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sample_mean"])
def test_prompts_one_by_one_give_what_all_together_give(baseline: str, aggregation: str, power: float) -> None:
    scored, norms = step()
    config = config_of(baseline=baseline, aggregation=aggregation, norm_power=power)
    advantage = AdvantageRule(scored, config, EARLIER)
    together = advantage(range(Q), norms)
    for prompts in ([0], [2], [2, 0]):
        torch.testing.assert_close(advantage(prompts, norms[prompts]), together[prompts], rtol=1e-12, atol=0)


def test_norms_next_to_nothing_are_told_by_those_of_earlier_steps() -> None:
    """Where the norms of the others are negligible, their plain mean is taken, in a call for one prompt as well."""
    scored, norms = step()
    config = config_of(baseline="optimal")
    norms[1] = torch.tensor([1.0, 1e-9, 3e-9, 2e-9])
    together = AdvantageRule(scored, config)(range(Q), norms)
    alone = AdvantageRule(scored, config, EARLIER)([1], norms[1:2])
    torch.testing.assert_close(alone, together[1:2], rtol=1e-12, atol=0)
    assert not torch.allclose(AdvantageRule(scored, config)([1], norms[1:2]), together[1:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_gives_a_coefficient_of_zero(value: float) -> None:
    scored, norms = step()
    norms[1, 2] = value
    found = AdvantageRule(scored, config_of(baseline="optimal"), EARLIER)([1], norms[1:2])
    assert found.isfinite().all() and (found == 0).nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sample_mean"])
def test_coefficients_have_the_divisor_of_the_aggregation(aggregation: str) -> None:
    scored, norms = step()
    config = config_of(baseline="optimal", aggregation=aggregation)
    divisor = {
        "constant": torch.full((Q, G), float(Q * G * 512), dtype=torch.float64),  # rollout.max_response_tokens
        "token_mean": scored.lengths.sum().expand(Q, G),
        "sample_mean": Q * G * scored.lengths,
    }[aggregation]
    want = advantages("optimal", scored.rewards, norms, scored.lengths) / divisor
    torch.testing.assert_close(AdvantageRule(scored, config)(range(Q), norms), want, rtol=1e-12, atol=0)


def test_running_mean_norm() -> None:
    assert running_mean_norm(torch.tensor([1.0, 3.0, float("nan"), 0.0]), 0.0) == 2.0
    assert running_mean_norm(torch.tensor([4.0]), 2.0, share=0.5) == 3.0
    assert running_mean_norm(torch.zeros(3), 2.0) == 2.0


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sample_mean"])
@pytest.mark.parametrize("baseline", ["rloo", "grpo", "reinforce_pp"])
def test_a_mini_batch_has_the_batches_advantages_and_its_own_divisor(baseline: str, aggregation: str) -> None:
    scored, norms = step()
    config = config_of(baseline=baseline, aggregation=aggregation, updates_per_batch=Q)
    whole = AdvantageRule(scored, config)
    together, lengths = whole(range(Q), norms), scored.lengths.double()
    for prompt in range(Q):
        factor = float(lengths.sum() / lengths[prompt].sum()) if aggregation == "token_mean" else Q
        part = whole.of_update([prompt])
        torch.testing.assert_close(part([0], norms[:1]), factor * together[[prompt]], rtol=1e-12, atol=0)
        assert part.active.tolist() == whole.active[[prompt]].tolist()


def factors_of(norms: torch.Tensor, mean_norm: float, power: float = 0.25) -> torch.Tensor:
    """Coefficients with tempering over those without it."""
    scored, _ = step()
    history = History(torch.full((Q,), 0.4, dtype=torch.float64), running_mean_norm=mean_norm)
    of_power = [AdvantageRule(scored, config_of(norm_power=gamma), history)(range(Q), norms) for gamma in (power, 0.0)]
    return of_power[0] / of_power[1]


def test_tempering_multiplies_by_a_power_of_the_norm_over_that_of_earlier_steps() -> None:
    _, norms = step()
    torch.testing.assert_close(factors_of(norms, 0.5), (0.5 / norms) ** 0.25, rtol=1e-12, atol=0)
    torch.testing.assert_close(factors_of(norms, 0.5, 0.5), (0.5 / norms) ** 0.5, rtol=1e-12, atol=0)


def test_nothing_is_tempered_before_a_norm_is_known() -> None:
    _, norms = step()
    assert bool((factors_of(norms, 0.0) == 1).all())


def test_a_norm_of_nothing_has_a_bounded_factor() -> None:
    _, norms = step()
    norms[0, 1], norms[2, 3] = 0.0, 1e-300
    for power, largest in ((0.125, 1e12**0.125), (0.5, 100.0)):
        found = factors_of(norms, 0.5, power)
        assert float(found.max()) == pytest.approx(largest) == float(found[0, 1]) and bool(found.isfinite().all())
