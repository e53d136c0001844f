"""A batch of prompts through several servers at once: asked, watched, and handed on when one of them is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oblr_megatron.errors import DeadlineError, EngineLostError, RunError
from oblr_megatron.rollout.balance import Balance, Task
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError, VllmServer, reasons

LATE_SECONDS = 5.0
"""A request may last longer than the whole, so that the whole's deadline is the one that ends it."""

Ask = Callable[[VllmServer, tuple[int, ...], float], Awaitable[Sequence[Any]]]
"""(server, numbers of prompts, seconds left) -> a result for each of them."""


async def dispatch(servers: Sequence[VllmServer], balance: Balance, ask: Ask, *, what: str, seconds: float) -> None:
    """Have every prompt of `balance` answered once.

    Args:
        servers: in the order that `balance` numbers them.
        balance: keeps the results, also when this raises, so that another call can go on where this one ended.
        ask: one request.
        what: is asked for, in error messages.
        seconds: the deadline.

    Raises:
        EngineLostError: no server is left.
        DeadlineError: the deadline passed.
        RunError: a server cannot be asked such a thing.
    """
    await _Dispatch(servers, balance, ask, what, seconds).run()


class _Dispatch:
    def __init__(self, servers: Sequence[VllmServer], balance: Balance, ask: Ask, what: str, seconds: float) -> None:
        self._servers, self._balance, self._ask = servers, balance, ask
        self._what, self._seconds = what, seconds
        self._deadline = time.monotonic() + seconds
        self._asked: dict[asyncio.Future[Any], Task] = {}
        self._watches: dict[asyncio.Future[Any], int] = {}

    async def run(self) -> None:
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
        """Wait until something happens, and take note of it."""
        left = self._deadline - time.monotonic()
        done, _ = await asyncio.wait(
            [*self._asked, *self._watches], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise DeadlineError("rank 0", self._what, self._seconds)
        for future in done:
            task = self._asked.pop(future, None)
            if task is None and future not in self._watches:
                continue  # of a server that was lost a moment ago
            number = self._watches[future] if task is None else task.server
            try:
                result = future.result()
            except (ServerLostError, ServerRefusedError) as error:
                self._lose(number, error)
            else:
                assert task is not None, "a watch never returns"
                self._balance.store(task, result)

    def _lose(self, number: int, error: RunError) -> None:
        """Give the server's requests back, and ask it no more."""
        self._servers[number].lose(str(error))
        self._balance.lose(number)
        for futures in (self._asked, self._watches):
            for future, owner in list(futures.items()):
                if (owner.server if isinstance(owner, Task) else owner) == number:
                    future.cancel()
                    futures.pop(future)
