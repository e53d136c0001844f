"""Client of a reward service. A request always ends by its deadline and raises nothing.

    POST URL    {"responses": [...], "answers": [...], "prompts": [...]}    lists of equal length
    200         {"rewards": [...]}                                          finite numbers, of the same length

With reward.send_rows the request also has "rows", the columns of each data row as an object.

Failed and dropped connections, status 429 and 5xx are retried; other errors are permanent. The pause before a retry
doubles each time. It is drawn from the upper half of [0, pause], so that ranks do not retry in lockstep, and is at
least the service's Retry-After.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from oblr_megatron.rewards.workers.calls import BATCH, Score, score_of

BACKOFF_S = 0.2
TOO_MANY, FAILED = 429, 500
ANSWER_BYTES = 2**20
"""Limit on the size of an answer, plus BYTES_A_REWARD for each reward."""
BYTES_A_REWARD = 64

Rows = Sequence[Sequence[str]]  # [n, 3] response, gold answer, prompt; or [n, 4] with the data row as JSON


class ServiceError(Exception):
    """The service gave no usable answer."""


class TransientError(ServiceError):
    """The request can be retried, after at least `after_s` seconds."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Service:
    """One reward service, used in one event loop. Arguments as for `HttpReward`; `session` must have no timeouts."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, key: str, deadline_s: float, retries: int) -> None:
        self._url, self._session = url, session
        self._deadline_s, self._retries = deadline_s, retries
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    async def score_batch(self, rows: Rows) -> list[Score]:
        """The score of each row. If the request fails, all rows get its error."""
        columns: dict[str, list[Any]] = {
            name: list(column) for name, column in zip(BATCH, zip(*rows, strict=True), strict=False)
        }
        if "rows" in columns:
            columns["rows"] = [json.loads(row) for row in columns["rows"]]
        body = json.dumps(columns).encode()
        try:
            return await self._ask(body, len(rows))
        except TimeoutError:
            return [Score(timed_out=True)] * len(rows)
        except ServiceError as error:
            return [Score(error=f"{self._url} {error}")] * len(rows)

    async def _ask(self, body: bytes, count: int) -> list[Score]:
        """Post with retries until the deadline.

        Raises:
            ServiceError: the error of the last attempt that ended.
            TimeoutError: no attempt ended within the deadline.
        """
        deadline, failed = time.monotonic() + self._deadline_s, None
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in range(self._retries + 1):
                    try:
                        return read_answer(await self._post(body, count), count)
                    except TransientError as error:
                        failed = error
                        pause = max(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0), error.after_s)
                        if attempt == self._retries or pause >= deadline - time.monotonic():
                            raise
                        await asyncio.sleep(pause)
        except TimeoutError:
            if failed is not None:  # it says more than the deadline
                raise failed from None
            raise
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: bytes, count: int) -> bytes:
        limit = ANSWER_BYTES + BYTES_A_REWARD * count
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                text = await _read(response.content, limit)
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"request failed: {str(error) or type(error).__name__}") from error
        if response.status == TOO_MANY or response.status >= FAILED:
            raise TransientError(_status(response.status, text), _seconds(response.headers.get("Retry-After", "")))
        if response.status != 200:
            raise ServiceError(_status(response.status, text))
        if len(text) > limit:
            raise ServiceError(f"answered with more than {limit} bytes for {count} responses")
        return text


async def _read(content: aiohttp.StreamReader, limit: int) -> bytes:
    """The body, cut off after it has exceeded `limit` bytes."""
    text = b""
    async for piece in content.iter_any():
        text += piece
        if len(text) > limit:
            break
    return text


def read_answer(text: bytes, count: int) -> list[Score]:
    """Parse an answer.

    Raises:
        ServiceError: the answer has no list of `count` rewards.
    """
    try:
        rewards = json.loads(text)["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ServiceError(f'sent something other than {{"rewards": [...]}}: {_start(text)}') from None
    if not isinstance(rewards, list) or len(rewards) != count:
        given = len(rewards) if isinstance(rewards, list) else "no list of"
        raise ServiceError(f"answered {given} rewards for {count} responses")
    return [score_of(reward) for reward in rewards]


def _status(status: int, text: bytes) -> str:
    return f"answered with status {status}: {_start(text)}"


def _start(text: bytes) -> str:
    return repr(text[:200].decode(errors="replace"))


def _seconds(retry_after: str) -> float:
    """The seconds until the time in a Retry-After header (seconds or a date); 0 for anything else."""
    try:
        return max(float(retry_after), 0.0) if retry_after.isdigit() else _until(parsedate_to_datetime(retry_after))
    except (ValueError, OverflowError):  # the latter for a date far beyond the calendar
        return 0.0


def _until(moment: datetime) -> float:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max((aware - datetime.now(UTC)).total_seconds(), 0.0)
