"""Replicas share the scoring: every rank gets the whole result, and one rank logs the first failure.

Not covered: worker processes (tests/unit/processes/test_pool.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from oblr_megatron.errors import DeadlineError
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.shared import SharedReward
from oblr_megatron.types import Prompt, Sample
from tests.distributed.launch import run_ranks

NUM_PROMPTS, GROUP = 5, 2
PROMPTS = [Prompt(q, str(q), "", (q,), "", "") for q in range(NUM_PROMPTS)]
SAMPLES = [Sample(n // GROUP, (n // GROUP,), (), (), str(n), "stop", 0) for n in range(NUM_PROMPTS * GROUP)]


class Numbers(Reward):
    """The sample's own number; in each share the first sample fails, and the last two are late."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        assert [sample.prompt_ids for sample in samples[::GROUP]] == [prompt.token_ids for prompt in prompts]
        values = [float(sample.text) for sample in samples]
        return RewardResult(
            rewards=values,
            faults={0: "failed", len(values) - 2: "late", len(values) - 1: "late"} if len(values) > 2 else {},
            error="a traceback",
            answers=[sample.text if sample.text != "3" else None for sample in samples],
            terms={"main": [value + 100 for value in values], "other": [-100.0] * len(values)},
        )


class Kept(logging.Handler):
    """The messages of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def on_rank(scoring: Sequence[int], prompts: int = NUM_PROMPTS) -> tuple[RewardResult, int]:
    """Two batches: the result, and the warnings of this rank."""
    kept = Kept()
    logging.getLogger("oblr_megatron.rewards.shared").addHandler(kept)
    rank = dist.get_rank()
    reward = SharedReward(Numbers(), scoring.index(rank) if rank in scoring else None, len(scoring))
    batch = PROMPTS[:prompts], SAMPLES[: prompts * GROUP]
    reward.score(*batch)
    return reward.score(*batch), len(kept.messages)


@pytest.mark.parametrize(
    ("scoring", "faults"),
    [
        ([0], {0: "failed", 8: "late", 9: "late"}),
        ([2, 0], {0: "failed", 2: "late", 3: "late", 4: "failed", 8: "late", 9: "late"}),
        ([0, 1, 2], {2: "failed", 4: "late", 5: "late", 6: "failed", 8: "late", 9: "late"}),
    ],
)
def test_every_rank_receives_everything_and_one_tells(scoring: list[int], faults: dict[int, str]) -> None:
    """10 samples of 5 prompts: 2 shares are of 4 and 6, 3 shares of 2, 4 and 4."""
    told = run_ranks(on_rank, 3, scoring)
    for result, _ in told:
        assert result.rewards == [float(n) for n in range(NUM_PROMPTS * GROUP)]
        assert result.faults == faults
        assert result.answers == [None if n == 3 else str(n) for n in range(NUM_PROMPTS * GROUP)]
        assert result.main_rewards == result.terms["main"] == [100.0 + n for n in range(NUM_PROMPTS * GROUP)]
        assert result.terms["other"] == [-100.0] * (NUM_PROMPTS * GROUP)
    assert [warnings for _, warnings in told] == [1, 0, 0]


def test_more_ranks_than_prompts() -> None:
    """A share without prompts has no answers, terms and faults."""
    for result, _ in run_ranks(on_rank, 2, [0, 1], 1):
        assert result == RewardResult(
            [0.0, 1.0], {}, "a traceback", ["0", "1"], {"main": [100, 101], "other": [-100] * 2}
        )


def without_the_other() -> str:
    """Rank 0 scores, rank 1 does not until rank 0 has given up."""
    reward, said = SharedReward(Numbers(), dist.get_rank(), 2, timeout_s=0.5), ""
    if dist.get_rank() == 0:
        with pytest.raises(DeadlineError) as raised:
            reward.score(PROMPTS, SAMPLES)
        said = str(raised.value)
    dist.barrier()
    return said


def test_a_rank_waits_for_another_until_the_timeout() -> None:
    """The samples' scores have no deadline of their own here."""
    said, _ = run_ranks(without_the_other, 2)
    assert "rank 0" in said and "other ranks" in said and "0.5" in said
