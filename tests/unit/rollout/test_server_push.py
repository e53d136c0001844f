"""A push into servers that fail in some step: who still gets it, and which error ends it.

Not covered: real servers (tests/e2e/test_servers.py), NCCL.
"""

from __future__ import annotations

from typing import Any

from oblr_megatron.engine import http_messages as http
from oblr_megatron.rollout.server_push import SharedMemoryTransport


class StubServer:
    """The part of `VllmServer` that a push uses. `failures` maps a step's path to the error of that step."""

    workers = 1

    def __init__(self, name: str, failures: dict[str, Exception] | None = None) -> None:
        self.name = self.url = name
        self.lost: str | None = None
        self.told: list[str] = []
        self.failures = failures or {}

    def lose(self, reason: str) -> None:
        self.lost = reason

    async def tell(self, path: str, body: http.Message, what: str, seconds: float) -> None:
        self.told.append(path)
        if path in self.failures:
            raise self.failures[path]


class StubTransport(SharedMemoryTransport):
    """Shared memory that no server maps. `failures` maps the name of a server to what `connect` raises for it."""

    def __init__(self, bucket_bytes: int = 64, failures: dict[str, Exception] | None = None) -> None:
        super().__init__(bucket_bytes)
        self.failures = failures or {}

    async def connect(self, server: Any, open_push: Any) -> None:
        if server.name in self.failures:
            raise self.failures[server.name]
        await open_push({})
