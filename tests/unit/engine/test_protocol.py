"""Seeds and requests. Not covered: vLLM's use of them (tests/e2e/test_rollout.py)."""

import pytest

from oblr_megatron.engine.protocol import SamplingRequest, prompt_seed
from oblr_megatron.errors import UserError


def test_seeds_are_fixed_and_distinct():
    assert prompt_seed(0, 0) == 788424145663840916  # must never change: recorded runs depend on it
    seeds = {prompt_seed(seed, position) + child for seed in range(40) for position in range(40) for child in range(8)}
    assert len(seeds) == 40 * 40 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) > 0.999 * len(seeds), "torch's CPU generator uses 32 bits of a seed"


@pytest.mark.parametrize(
    "change", [{"group_size": 0}, {"max_tokens": 0}, *({"temperature": one} for one in (0.005, -1.0, 2.01))]
)
def test_requests_that_vllm_would_change_or_refuse_are_refused(change):
    with pytest.raises(UserError, match=next(iter(change))):
        SamplingRequest(**({"group_size": 2, "temperature": 1.0, "max_tokens": 4, "seed": 0} | change))


def test_temperature_zero_is_greedy():
    assert SamplingRequest(group_size=2, temperature=0.0, max_tokens=4, seed=0).greedy
    assert not SamplingRequest(group_size=2, temperature=0.5, max_tokens=4, seed=0).greedy
