"""Recovery from lost engines: what colocated engines and API servers have in common.

All ranks learn the outcome of every call, so all of them count the same losses and take the same branch.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from oblr_megatron.config import Config
from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.engine.protocol import PushStats, RolloutEngine, SamplingRequest
from oblr_megatron.errors import DamagedError, EngineLostError, RunError
from oblr_megatron.extension import extension
from oblr_megatron.rewards.base import Reward
from oblr_megatron.rollout.feed import Put
from oblr_megatron.rollout.in_flight import InFlight
from oblr_megatron.runtime.collectives import Collectives, Outcome, raise_first
from oblr_megatron.types import Prompt, Sample
from oblr_megatron.weights.manifest import Source

Value = TypeVar("Value")

logger = logging.getLogger(__name__)


class Recovery:
    """Counts losses since all engines last sampled a whole batch.

    Engines lost at the same time count as one loss: they are restarted together.
    """

    def __init__(self, limit: int, *, logs: bool) -> None:
        """The first `limit` losses in a row each lead to a restart (`rollout.max_restarts`); the next is raised."""
        self._limit, self._logs, self._in_row = limit, logs, 0
        self.over = False  # the limit was exceeded: nothing is started any more

    def until_done(self, call: Callable[[], Value]) -> Value:
        """Call, and call again after each loss. The call itself knows what is left to do. Raises as `count`."""
        while True:
            try:
                return call()
            except EngineLostError as error:
                self.count(error)

    def count(self, error: EngineLostError) -> None:
        """Count a loss.

        Raises:
            EngineLostError: the limit was exceeded; with a limit of 0 the error itself.
        """
        self.over = self.over or self._in_row == self._limit
        if self.over and self._limit == 0:
            raise error
        if self.over:
            last = EngineLostError(
                f"{error}\nThis came after {self._limit} restarts without a completed rollout in between "
                "(rollout.max_restarts)"
            )
            last.raised_on_all_ranks = error.raised_on_all_ranks
            raise last from error
        self._in_row += 1
        if self._logs:
            reason = str(error).partition("; the end of ")[0]  # without the quoted tail of the engine's log
            logger.warning("restart %d of at most %d in a row: %s", self._in_row, self._limit, reason)

    def sampled(self) -> None:
        """Start counting again: all engines have sampled their share."""
        self._in_row = 0


class RecoveringEngines(RolloutEngine):
    """Engines that are replaced when lost; every rank calls every method with the same arguments."""

    _all = "every engine"

    def __init__(self, config: Config, rank: int) -> None:
        self._config, self._rank = config, rank
        self._collectives = Collectives(rank)
        self.recovery = Recovery(config.rollout.max_restarts, logs=rank == 0)
        self._source: Source | None = None  # source of the weights being served; None: the checkpoint
        self._version = self._restarts = 0
        self._behind = False  # an engine does not hold the weights being served
        self._unusable: str | None = None

    @property
    def version(self) -> int:
        return self._version

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        if self._unusable is not None:
            raise RunError(self._unusable)
        flight = InFlight(self, prompts, request, whole=True)
        groups = flight.next_groups(math.inf, seconds=self._config.rollout.generate_timeout_s)
        return [sample for group in groups.values() for sample in group]

    def begin(self, prompts: Sequence[Prompt], request: SamplingRequest, reward: Reward | None = None) -> InFlight:
        if self._unusable is not None:
            raise RunError(self._unusable)
        return InFlight(self, prompts, request, reward, whole=False)

    def push(self, source: Source, version: int) -> PushStats:
        self._unusable = f"push {version} did not reach {self._all}; generate again after one that does"
        stats = self.until_done(lambda: self._deliver(source, version))
        self._source, self._version, self._unusable = source, version, None
        return stats

    def metrics(self) -> dict[str, float]:
        """Restarts and speculation since the last call, of all engines together."""
        speculated: dict[str, float] = {}
        if self._config.rollout.speculation != "none":
            speculated = extension("rollout.speculation").metrics_of(self.reports())
        restarts, self._restarts = self._restarts, 0
        return {"rollout/restarts": restarts, **speculated}

    @abstractmethod
    def reports(self) -> list[DraftReport]:
        """Reports about speculation since the last call, one for each engine that answers; collective."""

    @abstractmethod
    def ready(self) -> None:
        """Bring the weights into every engine that lacks them; collective."""

    @abstractmethod
    def sampler(
        self, prompts: Sequence[Prompt], positions: Sequence[int], request: SamplingRequest, *, whole: bool
    ) -> Callable[[Put], None] | None:
        """A function that samples this rank's share of the prompts at these positions; None without an engine.

        `positions` are sorted. `whole` says that nobody needs a prompt before all of them are complete.
        """

    def _at_most_twice(self, push: Callable[[], Value]) -> Value:
        """Push, and once more if a bucket arrived damaged."""
        try:
            return push()
        except DamagedError:
            return push()

    @abstractmethod
    def _deliver(self, source: Source, version: int) -> PushStats:
        """One push into all engines."""

    def _bring_up(self) -> None:
        """Wait for engines that are starting, and restart those that were lost."""

    def _note_loss(self) -> None:
        self._behind = True

    def _due(self, source: Source) -> list[Source]:
        """The source, and before it the base that an adapter needs if an engine lacks it; collective."""
        base = getattr(source, "base", None)
        return [source] if base is None or not self._lack_base() else [base, source]

    @abstractmethod
    def _lack_base(self) -> bool:
        """Whether an engine lacks the base of the adapters; the same on every rank."""

    def until_done(self, call: Callable[[], Value]) -> Value:
        """Call with all engines up, and again after a loss, up to the limit."""

        def once() -> Value:
            try:
                self._bring_up()
                return call()
            except EngineLostError:
                self._note_loss()
                raise

        return self.recovery.until_done(once)

    def gather(self, own: Outcome[Any], what: str, seconds: float) -> list[Outcome[Any]]:
        """Every rank's outcome; if one failed, all ranks raise the same error.

        The wait covers the engines' deadline and the skew between the ranks.
        """
        patience = seconds + self._config.parallel.distributed_timeout_s
        outcomes = self._collectives.gather(own, what=what, seconds=patience)
        raise_first(outcomes, own)
        return outcomes
