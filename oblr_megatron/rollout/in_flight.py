"""A batch that engines are sampling: every rank takes the finished prompts together.

    batch = engines.begin(prompts, request)              # the engines sample in the background
    while groups := batch.next_groups(tokens=16_384):    # the same groups on every rank
        ...                                              # use them while the other prompts are sampled

When an engine is lost, the others finish their prompts. Then the engine is restarted and samples what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.rewards.base import divided
from oblr_megatron.rollout.feed import Arrived, Feed, Groups, num_tokens
from oblr_megatron.rollout.staleness import check_batch
from oblr_megatron.runtime.collectives import Outcome, attempt, raise_first

if TYPE_CHECKING:
    from oblr_megatron.rewards.base import Reward, RewardResult
    from oblr_megatron.rollout.recovery import RecoveringEngines
    from oblr_megatron.types import Prompt

POLL_SECONDS = 0.2
"""Longest time that a rank with an engine waits for more tokens before it shares what has come."""


class Complete:
    """A batch that is complete already. Groups come in the order in which engines finish them: the shortest first."""

    rewards: Mapping[int, RewardResult] = {}

    def __init__(self, groups: Groups) -> None:
        longest = {position: max(len(one.response_ids) for one in group) for position, group in groups.items()}
        self._groups, self._left = groups, sorted(sorted(groups), key=longest.__getitem__)

    def next_groups(self, tokens: float) -> Groups:
        groups: Groups = {}
        while self._left and sum(map(num_tokens, groups.values())) < tokens:
            position = self._left.pop(0)
            groups[position] = self._groups[position]
        return dict(sorted(groups.items()))


class InFlight:
    """One batch. Every rank makes it and calls every method with the same arguments."""

    def __init__(
        self,
        engines: RecoveringEngines,
        prompts: Sequence[Prompt],
        request: SamplingRequest,
        reward: Reward | None = None,
        *,
        whole: bool,
    ) -> None:
        """Start to sample.

        Args:
            engines, prompts, request: a prompt's position is its place in `prompts`.
            reward: scores the groups on the ranks that sample them; not collective.
            whole: whether nobody needs a prompt before the whole batch is complete.
        """
        self._engines, self._prompts, self._request, self._whole = engines, prompts, request, whole
        self._reward = reward
        self.rewards: dict[int, RewardResult] = {}
        self._what = f"{len(prompts)} x {request.group_size} samples"
        self._left = set(range(len(prompts)))
        self._feed: Feed | None = None
        self._ends: dict[int, Outcome[None]] = {}  # by rank, of the feeds that have ended
        self._own_end: Outcome[None] = Outcome()
        self._running = False
        engines.until_done(self._start)

    def next_groups(self, tokens: float, *, seconds: float = POLL_SECONDS) -> Groups:
        """Wait for finished prompts with at least `tokens` tokens, or for the rest of the batch; {} after its end.

        Ranks share what has come every `seconds`.

        Raises:
            EngineLostError: engines were lost, and restarted as often as `rollout.max_restarts` allows.
            RunError: an engine refused.
        """
        groups: Groups = {}

        def more() -> None:
            while self._left and (missing := tokens - sum(map(num_tokens, groups.values()))) > 0:
                self._start()
                self._round(groups, missing, seconds)
            while self._running and not self._left:  # an engine takes the next call only after the end of this one
                self._round(groups, tokens, seconds)

        if self._left:
            self._engines.until_done(more)
            samples = [sample for group in groups.values() for sample in group]
            check_batch(samples, len(groups) * self._request.group_size, self._engines.version)
            if not self._left:
                self._engines.recovery.sampled()
        return dict(sorted(groups.items()))

    def _start(self) -> None:
        """Let the engines sample what is missing, unless they do."""
        if self._running:
            return
        self._engines.ready()
        self._ends, self._own_end = {}, Outcome()
        run = self._engines.sampler(self._prompts, sorted(self._left), self._request, whole=self._whole)
        self._feed = None if run is None else Feed(run, None if self._reward is None else self._score)
        self._running = True

    def _score(self, groups: Groups) -> list[RewardResult]:
        """The rewards of some groups, in their order."""
        assert self._reward is not None, "without a reward nothing is scored"
        samples = [sample for group in groups.values() for sample in group]
        return divided(self._reward.score([self._prompts[position] for position in groups], samples), len(groups))

    def _round(self, groups: Groups, tokens: float, seconds: float) -> None:
        """Add to `groups` what has arrived on any rank; raise the errors of engines when all of them have ended."""
        feed = self._feed
        own: Outcome[Arrived | None] = attempt(lambda: None if feed is None else feed.collect(tokens, seconds))
        arrived: Arrived | None = own.value
        if arrived is not None:
            own = Outcome(value=arrived.sent())
            if arrived.end is not None:
                self._own_end, self._feed = arrived.end, None
        outcomes = self._engines.gather(own, self._what, seconds)
        arrivals = {rank: outcome.value for rank, outcome in enumerate(outcomes) if outcome.value is not None}
        for rank, part in arrivals.items():
            groups |= part.groups
            self.rewards |= part.rewards
            self._left -= part.groups.keys()
            if part.end is not None:
                self._ends[rank] = part.end
        if arrived is not None:
            groups |= arrived.groups  # with their routes
        if any(part.end is None for part in arrivals.values()):
            return
        self._running = False
        raise_first(list(self._ends.values()), self._own_end)
        assert not self._left, f"the engines ended without prompts {sorted(self._left)}"
