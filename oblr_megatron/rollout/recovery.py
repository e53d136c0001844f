"""When to try again after an engine was lost, and when to give up. The same on every rank, since all hear of a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from oblr_megatron.errors import EngineLostError

Value = TypeVar("Value")

logger = logging.getLogger(__name__)


class Recovery:
    """Counts losses since all engines last sampled a whole batch.

    Several engines lost at once count as one loss, for they are started again together.
    """

    def __init__(self, limit: int, *, tells: bool) -> None:
        """Args:
        limit: losses in a row that are mended (`rollout.max_restarts`); the next one is raised.
        tells: whether this rank logs what it does.
        """
        self._limit, self._tells, self._in_row = limit, tells, 0
        self.over = False  # there was one loss too many: nothing is started any more

    def until_done(self, call: Callable[[], Value]) -> Value:
        """Call, and call again after a loss; the call finds out itself what is left to do.

        Raises:
            EngineLostError: one loss too many.
        """
        while True:
            try:
                return call()
            except EngineLostError as error:
                self.count(error)

    def count(self, error: EngineLostError) -> None:
        """A loss that a restart is to follow.

        Raises:
            EngineLostError: the limit is reached; with a limit of 0 the error itself.
        """
        self.over = self.over or self._in_row == self._limit
        if self.over and self._limit == 0:
            raise error
        if self.over:
            raise EngineLostError(
                f"{error}\nThis came after {self._limit} restarts without a completed rollout in between "
                "(rollout.max_restarts)"
            ) from error
        self._in_row += 1
        if self._tells:
            reason = str(error).partition("; the end of ")[0]  # of the engine's log, where it quotes that
            logger.warning("restart %d of at most %d in a row: %s", self._in_row, self._limit, reason)

    def sampled(self) -> None:
        """All engines have sampled what they were asked for."""
        self._in_row = 0
