"""Samples a batch on several servers at once, and moves the prompts of a lost server to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from oblr_megatron.errors import DeadlineError, EngineLostError, EnginesGoneError
from oblr_megatron.rollout.balance import Balance, ServerTask
from oblr_megatron.rollout.server_client import ServerLostError, ServerRefusedError, VllmServer, reasons

LATE_SECONDS = 5.0
"""A request may take this much longer than the batch, so that the batch's deadline ends it."""

Ask = Callable[[VllmServer, tuple[int, ...], float], Awaitable[Sequence[Any]]]
"""(server, numbers of prompts, seconds left) -> one result per prompt."""

Store = Callable[[int, Any], None]
"""(number of a prompt, its result): called once for each prompt."""


async def dispatch(
    servers: Sequence[VllmServer], balance: Balance, ask: Ask, store: Store, *, what: str, seconds: float
) -> None:
    """Get one result for each prompt of a `Balance`, which numbers the servers in this order.

    Raises:
        EngineLostError: no server is left for `what`.
        EnginesGoneError: the deadline passed.
        RunError: a server cannot answer such a request.
    """
    deadline = time.monotonic() + seconds
    waits: dict[asyncio.Future[Any], tuple[int, ServerTask | None]] = {  # (server, its request; None: its health)
        asyncio.ensure_future(server.watch()): (number, None)
        for number, server in enumerate(servers)
        if server.lost is None
    }
    try:
        while not balance.finished:
            while (task := balance.next()) is not None:
                left = deadline + LATE_SECONDS - time.monotonic()
                waits[asyncio.ensure_future(ask(servers[task.server], task.items, left))] = task.server, task
            if all(task is None for _, task in waits.values()):
                raise EngineLostError(f"no server is left for {what}: {reasons(servers)}")
            left = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                asked = sorted({servers[number].name for number, task in waits.values() if task is not None})
                raise EnginesGoneError(str(DeadlineError("rank 0", f"{what} of {', '.join(asked)}", seconds)))
            for future in done:
                if future not in waits:
                    continue  # its server was lost in this round
                number, task = waits.pop(future)
                try:
                    results = future.result()
                except (ServerLostError, ServerRefusedError) as error:
                    servers[number].lose(str(error))
                    balance.lose(number)
                    for other in [other for other, (owner, _) in waits.items() if owner == number]:
                        other.cancel()
                        del waits[other]
                else:
                    assert task is not None, "a watch never returns"
                    balance.finish(task)
                    for item, result in zip(task.items, results, strict=True):
                        store(item, result)
    finally:
        for future in waits:
            future.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
