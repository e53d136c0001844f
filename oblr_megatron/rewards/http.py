"""A reward that a service computes, named by its URL; http_client.py says how it is spoken to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

import aiohttp

from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import Reward, RewardResult, collect, group_size, texts, whole_groups
from oblr_megatron.rewards.http_client import Rows, Service
from oblr_megatron.rewards.workers.pool import Outcome
from oblr_megatron.runtime.http_loop import HttpLoop, open_session
from oblr_megatron.types import Prompt, Sample

SCHEMES = {"http": 80, "https": 443}
REACH_S = 5.0
"""A service that takes longer to accept a connection is refused before the run."""


def is_url(name: str) -> bool:
    """Whether a reward's name is meant as an address."""
    return name.partition("://")[0].lower() in SCHEMES


class HttpReward(Reward):
    """Posts batches of whole groups, several at once."""

    def __init__(
        self, url: str, *, key: str, num_requests: int, deadline_s: float, batch_size: int, retries: int
    ) -> None:
        """Nothing is opened before the first batch.

        Args:
            url: of the service.
            key: bearer token; empty for none.
            num_requests: in flight at once.
            deadline_s: of a request with its retries, from when it is its turn.
            batch_size: responses a request, rounded up to whole groups.
            retries: further attempts of a request.
        """
        self._url, self._key, self._retries = url, key, retries
        self._num_requests, self._deadline_s, self._batch_size = num_requests, deadline_s, batch_size
        self._loop: HttpLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """What the service answers; see `Reward.score`."""
        rows = texts(prompts, samples)
        size = whole_groups(self._batch_size, group_size(prompts, samples))
        self._loop = self._loop or HttpLoop()
        return collect(self._loop.run(self._score_batch([rows[at : at + size] for at in range(0, len(rows), size)])))

    def longest_s(self, count: int) -> float:
        """Every request runs into its deadline."""
        requests = -(-count // self._batch_size)
        return -(-requests // self._num_requests) * self._deadline_s

    def close(self) -> None:
        """Close the connections, and end the thread that they belong to."""
        loop, self._loop = self._loop, None
        session, self._session = self._session, None
        if loop is None:
            return
        if session is not None:
            loop.run(session.close())
        loop.close()

    async def _score_batch(self, batches: Sequence[Rows]) -> list[Outcome]:
        self._session = self._session or open_session()
        service = Service(self._url, self._session, key=self._key, deadline_s=self._deadline_s, retries=self._retries)
        free = asyncio.Semaphore(self._num_requests)

        async def in_turn(rows: Rows) -> list[Outcome]:
            async with free:
                return await service.score_batch(rows)

        return [outcome for part in await asyncio.gather(*map(in_turn, batches)) for outcome in part]


def bearer_key(variable: str) -> str:
    """The token that an environment variable holds; empty if none is named.

    Raises:
        UserError: the variable is not set, or holds what cannot be sent.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"the environment variable {variable} {'is not a token' if key else 'is not set'}",
            where="config: reward.api_key_env",
            fix=f"export {variable}=..., or name none if the service asks for none",
        )
    return key


def check_service(url: str, where: str) -> None:
    """Refuse an address that is none, or where nobody listens.

    Raises:
        UserError: either.
    """
    parts = _parse(url)
    if parts is None or parts.username is not None or parts.fragment or not url.isprintable():
        raise UserError(
            f"{url!r} is not the address of a service",
            where=where,
            fix="write it as http://HOST:PORT/PATH; a token goes into the variable that reward.api_key_env names",
        )
    assert parts.hostname is not None, "an address without a host was refused"
    port = parts.port or SCHEMES[parts.scheme]
    try:
        socket.create_connection((parts.hostname, port), REACH_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: of a host name that no resolver takes
        raise UserError(
            f"the service {url} cannot be reached: {error}", where=where, fix="start it, or correct the address"
        ) from error


def _parse(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in SCHEMES and parts.hostname and parts.port != 0 else None
    except ValueError:  # of the port, or of brackets
        return None
