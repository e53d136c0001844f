"""Pools by position: the sums by hand, bins, sources, what is left out, resume to the bit, and the advantage.

Unbiasedness is test_unbiased.py's subject. Not covered: policies that change between steps.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from oblr_megatron.algo.formulas import NO_HISTORY, History
from oblr_megatron.algo.pools import Pools, TokenPools, pools_of
from oblr_megatron.algo.token_baseline import NUM_BINS, position_bins, token_advantages
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.types import Prompt, Scored

DECAY = 0.5
OPTIONS = AlgoConfig(baseline="pooled_token", pool_decay=DECAY)


def prompt(name: str, source: str = "sums") -> Prompt:
    return Prompt(0, name, "", (1,), "", source)


def step(pools: TokenPools, prompts: list[Prompt], rewards: list[list[float]], energies: list[list[float]]) -> None:
    values = torch.tensor(energies, dtype=torch.float64)
    lengths = (values >= 0).sum(-1).view(len(prompts), -1)  # a negative number stands for no token
    scored = Scored(torch.tensor(rewards, dtype=torch.float64), lengths, 0)
    pools.observe(prompts, scored, values, pools.history(prompts))


def expected(pools: TokenPools, asked: Prompt) -> Tensor:
    found = pools.history([asked]).by_position
    assert found is not None
    return found[0]


def test_bins_grow_by_powers_of_two() -> None:
    assert position_bins(16).tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4]


def test_a_pool_is_the_decayed_mean_weighted_with_the_energy_so_far() -> None:
    pools = TokenPools(OPTIONS)
    assert expected(pools, prompt("a")).isnan().all(), "nothing is known before the first step"
    step(pools, [prompt("a")], [[1.0, 0.0]], [[1.0, 2.0, -1.0], [2.0, 1.0, 3.0]])
    # W = 1 3 | 2 3 6: position 0 is a bin, positions 1 and 2 are the next
    found = expected(pools, prompt("b"))
    assert found[:2].tolist() == [1 / 3, 3 / 12]
    assert (found[2:] == 4 / 15).all(), "a bin without energy has the mean of all bins"
    step(pools, [prompt("b")], [[1.0, 1.0]], [[1.0, -1.0, -1.0], [1.0, -1.0, -1.0]])
    torch.testing.assert_close(expected(pools, prompt("c"))[0].item(), (0.5 * 1 + 2) / (0.5 * 3 + 2))
    assert expected(pools, prompt("c"))[1] == 3 / 12, "both sums have decayed"


def test_each_source_has_its_own_pools_and_a_new_one_begins_with_all() -> None:
    pools = TokenPools(OPTIONS)
    step(pools, [prompt("a"), prompt("b", "hard")], [[1.0], [0.0]], [[1.0], [3.0]])
    found = [expected(pools, prompt("c", source))[0].item() for source in ("sums", "hard", "new")]
    assert found == [1.0, 0.0, 0.25]
    assert pools.metrics() == {"pool/sums/mean": 1.0, "pool/hard/mean": 0.0}


def test_a_response_with_an_energy_that_is_not_finite_is_left_out() -> None:
    pools = TokenPools(OPTIONS)
    step(pools, [prompt("a")], [[1.0, 0.0]], [[1.0, 1.0], [2.0, math.inf]])
    assert expected(pools, prompt("b"))[:2].tolist() == [1.0, 1.0]


def test_the_state_survives_json_to_the_bit_and_fits_no_other_pools() -> None:
    pools, random = TokenPools(OPTIONS), torch.Generator().manual_seed(1)
    prompts = [prompt("a"), prompt("b", "hard")]

    def any_step() -> tuple[list[list[float]], list[list[float]]]:
        return torch.rand(2, 3, generator=random).tolist(), torch.rand(6, 5, generator=random).tolist()

    for _ in range(3):
        step(pools, prompts, *any_step())
    taken = pools.state_dict()
    before = json.dumps(taken)
    copy = TokenPools(OPTIONS)
    copy.load_state_dict(json.loads(before))
    values = any_step()
    for each in (pools, copy):
        step(each, prompts, *values)
    assert copy.state_dict() == pools.state_dict() and json.dumps(taken) == before
    others = Pools(AlgoConfig(baseline="pooled"))
    empty = others.state_dict()
    others.load_state_dict(taken)
    assert others.state_dict() == empty
    copy.load_state_dict(empty)
    assert expected(copy, prompt("a")).isnan().all()


def test_the_advantage_is_the_reward_minus_the_positions_pool() -> None:
    rewards, lengths = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[3, 1], [2, 0]])
    history = History(
        by_position=torch.stack([torch.arange(NUM_BINS).double() / 10, torch.full((NUM_BINS,), torch.nan).double()])
    )
    found = token_advantages("pooled_token", rewards, torch.rand(4, 3), lengths, history)
    want = [[1.0, 0.9, 0.9], [0.0, 0, 0], [-0.5, -0.5, 0], [0, 0, 0]]  # the second prompt has the first one's mean
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    first = token_advantages("pooled_token", rewards, torch.rand(4, 3), lengths, NO_HISTORY)
    assert first[:2, 0].tolist() == [1.0, 0.0]
    alone = token_advantages("pooled_token", rewards[:1, :1], torch.rand(1, 3), lengths[:1, :1])
    assert alone.tolist() == [[1.0, 1.0, 1.0]], "one response of one prompt has no baseline in the first step"


def test_the_run_of_a_token_wise_pool_has_these_pools() -> None:
    assert isinstance(pools_of(OPTIONS), TokenPools)
