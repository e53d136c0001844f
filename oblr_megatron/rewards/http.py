"""A reward computed by an HTTP service, named by its URL. The protocol is in http_client.py."""

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
from oblr_megatron.rewards.workers.calls import Score
from oblr_megatron.rewards.workers.patience import Patience
from oblr_megatron.runtime.http_loop import HttpLoop, open_session
from oblr_megatron.types import Prompt, Sample

SCHEMES = {"http": 80, "https": 443}
REACH_S = 5.0
"""Deadline for the test connection before the run."""


def is_url(name: str) -> bool:
    """Whether a reward's name is a URL."""
    return name.partition("://")[0].lower() in SCHEMES


class HttpReward(Reward):
    """Posts batches of whole groups, with several requests in flight."""

    def __init__(
        self,
        url: str,
        *,
        key: str,
        num_requests: int,
        deadline_s: float,
        batch_size: int,
        retries: int,
        send_rows: bool,
    ) -> None:
        """Connections are opened with the first batch.

        Args:
            url: of the service.
            key: bearer token; empty for none.
            num_requests: maximum number of requests in flight.
            deadline_s: for a request including its retries, not counting the wait for a free slot.
            batch_size: responses per request, rounded up to whole groups.
            retries: after a request that failed.
            send_rows: whether requests contain the columns of the data rows.
        """
        self._url, self._key, self._retries = url, key, retries
        self._num_requests, self._deadline_s, self._batch_size = num_requests, deadline_s, batch_size
        self._send_rows = send_rows
        self._patience = Patience.of(num_requests)
        self._loop: HttpLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def sees_groups(self) -> bool:
        """A request has all responses to a prompt."""
        return True

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The service's rewards; see `Reward.score`."""
        rows = texts(prompts, samples, with_row=self._send_rows)
        size = whole_groups(self._batch_size, group_size(prompts, samples))
        self._loop = self._loop or HttpLoop()
        return collect(self._loop.run(self._score_batch([rows[at : at + size] for at in range(0, len(rows), size)])))

    def longest_s(self, count: int) -> float:
        """Every request takes until its deadline."""
        requests = -(-count // self._batch_size)
        return -(-requests // self._num_requests) * self._deadline_s

    def close(self) -> None:
        """Close the connections and end their thread."""
        loop, self._loop = self._loop, None
        session, self._session = self._session, None
        if loop is None:
            return
        if session is not None:
            loop.run(session.close())
        loop.close()

    async def _score_batch(self, batches: Sequence[Rows]) -> list[Score]:
        self._session = self._session or open_session()
        service = Service(self._url, self._session, key=self._key, deadline_s=self._deadline_s, retries=self._retries)
        scores: list[list[Score]] = [[] for _ in batches]
        remaining = self._patience.begin(len(batches))

        async def dispatch() -> None:
            for position in remaining:
                rows = batches[position]
                if self._patience.ended:
                    scores[position] = [Score(timed_out=True)] * len(rows)
                    continue
                scores[position] = await service.score_batch(rows)
                self._patience.take(scores[position])

        await asyncio.gather(*(dispatch() for _ in range(self._num_requests)))
        return [score for part in scores for score in part]


def bearer_key(variable: str) -> str:
    """The bearer token in an environment variable; empty if `variable` is empty.

    Raises:
        UserError: the variable is not set, or is not printable ASCII.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"the environment variable {variable} {'is not a token' if key else 'is not set'}",
            where="config: reward.api_key_env",
            fix=f"export {variable}=TOKEN, or leave reward.api_key_env empty",
        )
    return key


def check_service(url: str, where: str) -> None:
    """Check the address, and connect to it once.

    Raises:
        UserError: the address is malformed, or nothing listens there.
    """
    parts = _parse(url)
    if parts is None or parts.username is not None or parts.fragment or not url.isprintable():
        raise UserError(
            f"{url!r} is not the address of a service",
            where=where,
            fix="write http://HOST:PORT/PATH, and put a token into the variable that reward.api_key_env names",
        )
    assert parts.hostname is not None, "_parse refuses an address without a host"
    port = parts.port or SCHEMES[parts.scheme]
    try:
        socket.create_connection((parts.hostname, port), REACH_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
        raise UserError(
            f"cannot connect to the service {url}: {error}", where=where, fix="start it, or correct the address"
        ) from error


def _parse(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in SCHEMES and parts.hostname and parts.port != 0 else None
    except ValueError:  # malformed port or brackets
        return None
