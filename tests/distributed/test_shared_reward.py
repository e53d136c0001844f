"""The replicas share the judging: every rank receives the whole result, and one of them tells of the first failure.

Does not cover: worker processes (tests/unit/rewards/test_pool.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.shared import SharedReward
from oblr_megatron.types import Prompt, Sample
from tests.distributed.launch import run_ranks

NUM_PROMPTS, GROUP = 5, 2
PROMPTS = [Prompt(q, str(q), "", (q,), "", "") for q in range(NUM_PROMPTS)]
SAMPLES = [Sample(n // GROUP, (n // GROUP,), (), (), str(n), "stop", 0) for n in range(NUM_PROMPTS * GROUP)]


class Numbers(Reward):
    """The sample's own number, and one failure in each share."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        assert [sample.prompt_ids for sample in samples[::GROUP]] == [prompt.token_ids for prompt in prompts]
        return RewardResult([float(sample.text) for sample in samples], failures=1, timeouts=2, error="a traceback")


class Kept(logging.Handler):
    """The messages of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def on_rank(judging: Sequence[int]) -> tuple[RewardResult, int]:
    """Two batches: the result, and the warnings of this rank."""
    kept = Kept()
    logging.getLogger("oblr_megatron.rewards.shared").addHandler(kept)
    rank = dist.get_rank()
    reward = SharedReward(Numbers(), judging.index(rank) if rank in judging else None, len(judging))
    reward.score(PROMPTS, SAMPLES)
    return reward.score(PROMPTS, SAMPLES), len(kept.messages)


def test_every_rank_receives_everything_and_one_tells() -> None:
    for judging in ([0], [0, 1, 2], [2, 0]):
        answers = run_ranks(on_rank, 3, judging)
        for result, _ in answers:
            assert result.rewards == [float(n) for n in range(NUM_PROMPTS * GROUP)]
            assert (result.failures, result.timeouts) == (len(judging), 2 * len(judging))
        assert [warnings for _, warnings in answers] == [1, 0, 0]
