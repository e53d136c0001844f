"""Assigns prompts to servers: the server with the fewest outstanding tokens gets the next ones.

    balance = Balance(costs=[520] * 64, capacities=[256, 256], sequences=8)
    while not balance.finished:
        while (task := balance.next()) is not None:
            ...                                  # ask server task.server for prompts task.items
        balance.finish(task)                     # or balance.lose(task.server), and others take its prompts

A prompt costs its own tokens plus the most that its responses may have. A server gets only as many prompts as it can
decode at once, so the remaining prompts go to the server that finishes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PROMPTS = 4
"""Most prompts of one request when the whole batch is awaited. Few, since a request is answered as a whole; not one,
since each request costs time."""


@dataclass(frozen=True, slots=True)
class ServerTask:
    """One request: prompts for one server. Example: ServerTask(server=0, items=(4, 5, 6, 7))"""

    server: int
    items: tuple[int, ...]


class Balance:
    """The prompts of one batch, sampled by several servers. Each prompt is finished once."""

    def __init__(
        self, costs: Sequence[int], capacities: Sequence[int], sequences: int, *, together: int = MOST_PROMPTS
    ) -> None:
        """Args:
        costs: tokens of each prompt and its responses.
        capacities: sequences that each server decodes at once; 0 for a server that is not used.
        sequences: of one prompt.
        together: most prompts of one request.
        """
        self._costs, self._capacities, self._sequences = costs, list(capacities), sequences
        self._together = together
        self._pending = list(range(len(costs)))
        self._running: list[set[ServerTask]] = [set() for _ in capacities]
        self._left = len(costs)

    @property
    def finished(self) -> bool:
        """Whether every prompt is finished."""
        return self._left == 0

    def next(self) -> ServerTask | None:
        """The next request; None while every server is full, or if no prompt is left."""
        room = [server for server in range(len(self._capacities)) if self._room(server) > 0]
        if not room or not self._pending:
            return None
        server = min(room, key=lambda server: (self.outstanding(server), server))
        servers = sum(capacity > 0 for capacity in self._capacities)
        fair = -(-len(self._pending) // (2 * servers))  # otherwise a short batch would be one request to one server
        count = max(1, min(self._together, fair, self._room(server)))
        task = ServerTask(server, tuple(self._pending[:count]))
        del self._pending[:count]
        self._running[server].add(task)
        return task

    def finish(self, task: ServerTask) -> None:
        """Note that a request was answered; a KeyError if its server was lost."""
        self._running[task.server].remove(task)
        self._left -= len(task.items)

    def lose(self, server: int) -> None:
        """Take a lost server's prompts back; they are the next ones to be assigned."""
        taken_back = [item for task in self._running[server] for item in task.items]
        self._pending = sorted(taken_back + self._pending)
        self._running[server].clear()
        self._capacities[server] = 0

    def outstanding(self, server: int) -> int:
        """Most tokens that a server may still have to sample."""
        return sum(self._costs[item] for task in self._running[server] for item in task.items)

    def _room(self, server: int) -> int:
        """Prompts that a server has room for. An idle server takes one prompt, whatever its number of sequences."""
        running = sum(len(task.items) for task in self._running[server])
        if running == 0 and self._capacities[server] > 0:
            return max(1, self._capacities[server] // self._sequences)
        return self._capacities[server] // self._sequences - running
