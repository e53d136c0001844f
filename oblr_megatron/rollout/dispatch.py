"""Samples a batch on several servers at once, and moves the prompts of a lost server to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oblr_megatron.errors import DeadlineError, EngineLostError, EnginesGoneError, RunError
from oblr_megatron.rollout.balance import Balance, Task
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError, VllmServer, reasons

LATE_SECONDS = 5.0
"""A request may take this much longer than the batch, so that the batch's deadline ends it."""

Ask = Callable[[VllmServer, tuple[int, ...], float], Awaitable[Sequence[Any]]]
"""(server, numbers of prompts, seconds left) -> one result per prompt."""

Store = Callable[[int, Any], None]
"""(number of a prompt, its result): called once for each prompt."""


class Dispatch:
    """Gets one result for each prompt of a `Balance`."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        balance: Balance,
        ask: Ask,
        store: Store,
        *,
        what: str,
        seconds: float,
    ) -> None:
        """`balance` numbers the servers in this order; `what` is sampled, for error messages."""
        self._servers, self._balance, self._ask, self._store = servers, balance, ask, store
        self._what, self._seconds = what, seconds
        self._deadline = time.monotonic() + seconds
        self._asked: dict[asyncio.Future[Any], Task] = {}
        self._watches: dict[asyncio.Future[Any], int] = {}

    async def run(self) -> None:
        """Raises:
        EngineLostError: no server is left.
        EnginesGoneError: the deadline passed.
        RunError: a server cannot answer such a request.
        """
        self._watches = {
            asyncio.ensure_future(server.watch()): number
            for number, server in enumerate(self._servers)
            if server.lost is None
        }
        try:
            while not self._balance.finished:
                self._fill()
                if not self._asked:
                    raise EngineLostError(f"no server is left for {self._what}: {reasons(self._servers)}")
                await self._one_round()
        finally:
            running = [*self._asked, *self._watches]
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _fill(self) -> None:
        while (task := self._balance.next()) is not None:
            left = self._deadline + LATE_SECONDS - time.monotonic()
            self._asked[asyncio.ensure_future(self._ask(self._servers[task.server], task.items, left))] = task

    async def _one_round(self) -> None:
        """Wait for the next results or losses, and record them."""
        left = self._deadline - time.monotonic()
        done, _ = await asyncio.wait(
            [*self._asked, *self._watches], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise EnginesGoneError(str(DeadlineError("rank 0", self._what, self._seconds)))
        for future in done:
            task = self._asked.pop(future, None)
            if task is None and future not in self._watches:
                continue  # of a server that was lost in this round
            number = self._watches[future] if task is None else task.server
            try:
                results = future.result()
            except (ServerLostError, ServerRefusedError) as error:
                self._lose(number, error)
            else:
                assert task is not None, "a watch never returns"
                if self._balance.finish(task):
                    for item, result in zip(task.items, results, strict=True):
                        self._store(item, result)

    def _lose(self, number: int, error: RunError) -> None:
        """Return the server's prompts to `balance`, and stop using it."""
        self._servers[number].lose(str(error))
        self._balance.lose(number)
        for futures in (self._asked, self._watches):
            for future, owner in list(futures.items()):
                if (owner.server if isinstance(owner, Task) else owner) == number:
                    future.cancel()
                    futures.pop(future)
