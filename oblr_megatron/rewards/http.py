"""A reward computed by an HTTP service, named by its URL. A request always ends by its deadline and raises nothing.

    POST URL    {"responses": [...], "answers": [...], "prompts": [...]}    lists of equal length
    200         {"rewards": [...]}                                          finite numbers, of the same length

With reward.send_rows the request also has "rows", the columns of each data row as an object. NaN and infinity are null.

Failed and dropped connections are retried until the deadline, status 429 and 5xx RETRIES times; other errors are
permanent. The pause before a retry doubles RETRIES times. It is drawn from the upper half of
[0, pause], so that ranks do not retry in lockstep, and is at least the service's Retry-After.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import time
from collections.abc import Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.calls import BATCH, Score, score_of
from oblr_megatron.processes.patience import Patience
from oblr_megatron.rewards.base import Reward, RewardResult, collect, group_size, texts, whole_groups
from oblr_megatron.runtime.http_loop import HttpLoop, open_session
from oblr_megatron.types import Prompt, Sample

SCHEMES = {"http": 80, "https": 443}
REACH_S = 5.0
"""Deadline for the test connection before the run."""
RETRIES = 3  # for each request that the service answers with an error
BACKOFF_S = 0.2
TOO_MANY, FAILED = 429, 500
ANSWER_BYTES = 2**20
"""Limit on the size of an answer, plus BYTES_A_REWARD for each reward."""
BYTES_A_REWARD = 64

Rows = Sequence[Sequence[str]]  # [n, 3] response, gold answer, prompt; or [n, 4] with the data row as JSON


def is_url(name: str) -> bool:
    """Whether a reward's name is a URL."""
    return name.partition("://")[0].lower() in SCHEMES


class ServiceError(Exception):
    """The service gave no usable answer."""


class DroppedError(ServiceError):
    """There was no connection, or it ended before the answer: the service may start again, the network may heal."""

    after_s = 0.0


class TransientError(ServiceError):
    """The service answered that the request can be retried, after at least `after_s` seconds."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class HttpReward(Reward):
    """Posts batches of whole groups, with several requests in flight."""

    def __init__(self, url: str, config: RewardConfig) -> None:
        """Connections are opened with the first batch."""
        key = bearer_key(config.api_key_env)
        self._url, self._config = url, config
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._patience = Patience(config.num_workers)
        self._loop: HttpLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The service's rewards; see `Reward.score`."""
        rows = texts(prompts, samples, BATCH if self._config.send_rows else BATCH[:-1])
        size = whole_groups(self._config.batch_size, group_size(prompts, samples))
        self._loop = self._loop or HttpLoop()
        return collect(self._loop.run(self._score_batch([rows[at : at + size] for at in range(0, len(rows), size)])))

    def longest_s(self, count: int) -> float:
        """Every request takes until its deadline."""
        requests = -(-count // self._config.batch_size)
        return -(-requests // self._config.num_workers) * self._config.timeout_s

    def close(self) -> None:
        """Close the connections and end their thread."""
        loop, self._loop = self._loop, None
        session, self._session = self._session, None
        if loop is None:
            return
        if session is not None:
            loop.run(session.close())
        loop.close()

    async def _score_batch(self, requests: Sequence[Rows]) -> list[Score]:
        self._session = session = self._session or open_session()
        scores = [[Score(timed_out=True)] * len(rows) for rows in requests]
        remaining = self._patience.begin(len(requests))

        async def dispatch() -> None:
            for position in remaining:
                scores[position] = await self._score_request(session, requests[position])
                self._patience.note(scores[position])

        await asyncio.gather(*(dispatch() for _ in range(self._config.num_workers)))
        return [score for part in scores for score in part]

    async def _score_request(self, session: aiohttp.ClientSession, rows: Rows) -> list[Score]:
        """The score of each row. If the request fails, all rows get its error."""
        columns: dict[str, list[Any]] = {
            name: list(column) for name, column in zip(BATCH, zip(*rows, strict=True), strict=False)
        }
        if "rows" in columns:
            strict = json.JSONDecoder(parse_constant=lambda constant: None)  # NaN and infinity are no JSON
            columns["rows"] = [strict.decode(row) for row in columns["rows"]]
        try:
            return await self._ask(session, json.dumps(columns).encode(), len(rows))
        except TimeoutError:
            return [Score(timed_out=True)] * len(rows)
        except ServiceError as error:
            return [Score(error=f"{self._url} {error}")] * len(rows)

    async def _ask(self, session: aiohttp.ClientSession, body: bytes, count: int) -> list[Score]:
        """Post with retries until the deadline.

        Raises:
            ServiceError: the error of the last attempt that ended.
            TimeoutError: no attempt ended within the deadline.
        """
        deadline, failed, refused = time.monotonic() + self._config.timeout_s, None, 0
        try:
            async with asyncio.timeout(self._config.timeout_s):
                for attempt in itertools.count():
                    try:
                        return _read_answer(await self._post(session, body, count), count)
                    except (DroppedError, TransientError) as error:
                        failed = error
                        pause = BACKOFF_S * 2 ** min(attempt, RETRIES) * random.uniform(0.5, 1.0)
                        pause = max(pause, error.after_s)
                        refused += isinstance(error, TransientError)  # dropped connections have no limit but the time
                        if refused > RETRIES or pause >= deadline - time.monotonic():
                            raise
                        await asyncio.sleep(pause)
        except TimeoutError:
            if failed is not None:  # it says more than the deadline
                raise failed from None
            raise
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, session: aiohttp.ClientSession, body: bytes, count: int) -> bytes:
        limit, text = ANSWER_BYTES + BYTES_A_REWARD * count, b""
        try:
            async with session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as response:
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > limit:
                        break
        except (aiohttp.ClientError, OSError) as error:
            raise DroppedError(f"request failed: {str(error) or type(error).__name__}") from error
        status = f"answered with status {response.status}: {_start(text)}"
        if response.status == TOO_MANY or response.status >= FAILED:
            raise TransientError(status, _seconds(response.headers.get("Retry-After", "")))
        if response.status != 200:
            raise ServiceError(status)
        if len(text) > limit:
            raise ServiceError(f"answered with more than {limit} bytes for {count} responses")
        return text


def _read_answer(text: bytes, count: int) -> list[Score]:
    """The scores in an answer; ServiceError unless it has a list of `count` rewards."""
    try:
        rewards = json.loads(text)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ServiceError(f'sent something other than {{"rewards": [...]}}: {_start(text)}') from None
    if not isinstance(rewards, list) or len(rewards) != count:
        given = len(rewards) if isinstance(rewards, list) else "no list of"
        raise ServiceError(f"answered {given} rewards for {count} responses")
    return [score_of(reward) for reward in rewards]


def _start(text: bytes) -> str:
    return repr(text[:200].decode(errors="replace"))


def _seconds(retry_after: str) -> float:
    """The seconds until the time in a Retry-After header (seconds or a date); 0 for anything else."""
    try:
        if retry_after.isdigit():
            return float(retry_after)
        moment = parsedate_to_datetime(retry_after)
        return max(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):  # the latter for a date far beyond the calendar
        return 0.0


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


def check_address(url: str, where: str) -> tuple[str, int]:
    """Host and port of a service.

    Raises:
        UserError: the address is malformed.
    """
    host, port = _address(url) if url.isprintable() else ("", 0)
    if not host:
        raise UserError(
            f"{url!r} is not the address of a service",
            where=where,
            fix="write http://HOST:PORT/PATH, and put a token into the variable that reward.api_key_env names",
        )
    return host, port


def check_service(url: str, where: str) -> None:
    """Connect to a service once.

    Raises:
        UserError: the address is malformed, or nothing listens there.
    """
    host, port = check_address(url, where)
    try:
        socket.create_connection((host, port), REACH_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
        raise UserError(
            f"cannot connect to the service {url}: {error}", where=where, fix="start it, or correct the address"
        ) from error


def _address(url: str) -> tuple[str, int]:
    """Host and port of a URL without user and fragment; ("", 0) for anything else."""
    try:
        parts = urlsplit(url)
        port = SCHEMES[parts.scheme] if parts.port is None else parts.port
    except (ValueError, KeyError):  # malformed port or brackets; another scheme
        return "", 0
    usable = port != 0 and parts.username is None and not parts.fragment
    return (parts.hostname or "", port) if usable else ("", 0)
