"""The trainer's handle of one server. Every wait has a deadline, and dropped connections are retried.

    server = VllmServer("http://10.0.0.5:8000", key)
    info = await server.info(seconds=10)
    groups = await server.sample(asked, holding, seconds=600)

The trainer did not start the server and cannot restart it. A lost server gets no prompts until it answers again and has
received all weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.protocol import PromptRequest
from oblr_megatron.errors import DamagedError, DeadlineError, EngineLostError, RunError
from oblr_megatron.runtime.http_loop import open_session
from oblr_megatron.types import Sample

if TYPE_CHECKING:
    from oblr_megatron.config.rollout import RolloutConfig

logger = logging.getLogger(__name__)

RETRIES = 3
"""Retries after a dropped request, before the server counts as lost."""
BACKOFF_SECONDS = 0.2
"""Wait before the first retry; it doubles with each further one."""
WATCH_SECONDS = 5.0
"""Interval of the health checks while a server samples."""
SILENCE_SECONDS = 30.0
"""A sampling server counts as hung after so long without an answer, or after a third of the call's deadline: another
server needs the rest."""
HANG_SHARE = 0.5
"""A server's engine counts as hung if it has not answered its own HTTP server for this share of the call's deadline,
but at least `SILENCE_SECONDS`. It answers between steps, and a step with a long prompt or a compilation may take
minutes."""
DROPPED = (408, 429)
"""HTTP status if a request came too slowly, and if a proxy has too many of them."""


def silences(rollout: RolloutConfig) -> tuple[float, float]:
    """Seconds without an answer after which a server counts as hung, and an engine without an answer to its server."""
    seconds = rollout.generate_timeout_s
    return min(SILENCE_SECONDS, seconds / 3), max(SILENCE_SECONDS, HANG_SHARE * seconds)


class ServerLostError(EngineLostError):
    """A server died, hung, failed internally, or cannot be reached any more."""


class ServerRefusedError(RunError):
    """A healthy server refused a request: it holds other weights, or the push is wrong."""


class VllmServer:
    """The trainer's handle of a server. All its coroutines run in one event loop.

    Every error names the server once; `what`, which is waited for, does not.
    """

    def __init__(
        self, url: str, key: str, *, owner: str = "rank 0", silence_s: float = 30.0, hang_s: float = 900.0
    ) -> None:
        """Args:
        key: empty for none.
        silence_s: a sampling server counts as hung after so long without an answer,
        hang_s: and if its engine has not answered it for so long.
        """
        self.name, self.owner, self.silence_s, self.hang_s = f"server {url}", owner, silence_s, hang_s
        self.lost: str | None = None  # why it gets no prompts
        self.unfit = False  # lost, and waiting is useless: it answers, but not as expected
        self.capacity = 1  # sequences it decodes at once
        self.workers = 1  # processes that receive weights
        self.instance = ""  # the server process, from its last answer
        self.base: str | None = None  # `Info.base` of its last answer
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    def lose(self, reason: str, *, unfit: bool = False) -> None:
        """Stop using it until it has received a push again."""
        if reason != self.lost:
            logger.warning("%s; it gets no prompts meanwhile", reason)
        self.lost, self.unfit = reason, unfit

    async def info(self, seconds: float) -> http.Info:
        """The server's settings and state."""
        info = await self._ask(http.Info, "info", {}, "an answer", seconds)
        self.capacity, self.workers = info.max_num_seqs, info.workers
        self.instance, self.base = info.instance, info.base
        return info

    async def sample(self, asked: Sequence[PromptRequest], holding: http.Holding, seconds: float) -> list[list[Sample]]:
        """A group of G samples for each prompt, from these weights.

        Raises:
            ServerLostError: it died, or the deadline passed.
            ServerRefusedError: it holds other weights.
            RunError: it does not accept the prompts, or its answer does not fit the request.
        """
        wanted = [one.request.group_size for one in asked]
        what = f"{len(wanted)} x {wanted[0]} samples"
        arguments = {"asked": asked, "holding": holding}
        answer = await self._ask(http.SampleAnswer, "sample", arguments, what, seconds, RETRIES)
        if answer.holding != holding:
            raise ServerRefusedError(f"{self.name} sampled from version {answer.holding.version}")
        sizes = [len(group) for group in answer.groups]
        if sizes != wanted:
            raise RunError(f"{self.name} answered with groups of {sizes} samples for {what}")
        return answer.samples(asked)

    async def digests(self, seconds: float) -> list[dict[str, str]]:
        """Digests of the weights that its workers hold; see `weights.verify`."""
        return await self._ask(list[dict[str, str]], "digests", {}, "digests of the weights", seconds)

    async def speculation(self, seconds: float) -> http.DraftReport:
        """Its drafts since the last call, and the bound."""
        return await self._ask(http.DraftReport, "speculation", {}, "a report of the speculation", seconds)

    async def tell(self, method: str, arguments: dict[str, Any], what: str, seconds: float) -> None:
        """Send a step of a push. It is not retried: a server that received it would refuse it the second time.

        Raises:
            DamagedError: a bucket arrived with another checksum.
            ServerLostError, ServerRefusedError: see `sample`.
        """
        await self._ask(Any, method, arguments, what, seconds)

    async def watch(self) -> NoReturn:
        """Check its health until it counts as hung; then it is lost (ServerLostError)."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, self.silence_s / 2))
            try:
                text = await self._request(http.HEALTH, None, "the health", self.silence_s / 2)
                health = self._read(http.Health, text, http.HEALTH)
            except RunError as error:  # any: an answer may be a proxy's
                if time.monotonic() - heard > self.silence_s:
                    raise ServerLostError(f"{error}; no sign of life for {self.silence_s:g} s") from error
                continue
            heard = time.monotonic()
            if health.silent > self.hang_s:
                raise ServerLostError(f"the engine of {self.name} has not answered for {health.silent:.0f} s")

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(
        self, kind: Any, method: str, arguments: dict[str, Any], what: str, seconds: float, retries: int = 0
    ) -> Any:
        """Call a method of the engine; returns its value, of this type. A dropped connection is retried."""
        deadline = time.monotonic() + seconds
        path, body = http.PATHS[method], to_json(arguments)
        for attempt in range(retries + 1):
            try:
                return self._read(kind, await self._request(path, body, what, deadline - time.monotonic()), path)
            except DroppedError:
                if attempt == retries:
                    raise
                await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, kind: Any, text: bytes, path: str) -> Any:
        try:
            return TypeAdapter(kind).validate_json(text)
        except ValidationError as error:
            first, reason = error.errors(include_url=False)[0], f"{self.name} sent an invalid answer to {path}: "
            if first["type"] == "json_invalid":
                raise self._foreign(reason + text[:200].decode(errors="replace")) from error
            raise RunError(f"{reason}{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    async def _request(self, path: str, payload: bytes | None, what: str, seconds: float) -> bytes:
        self._session = self._session or open_session()
        method = "GET" if payload is None else "POST"
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(method, self.url + path, data=payload, headers=self._headers) as response,
            ):
                status, text = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            # asyncio's timeout is the deadline. aiohttp's, for a connection that nobody accepts, is also a ClientError.
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                late = DeadlineError(self.owner, f"{what} of {self.name}", round(seconds, 1))
                raise ServerLostError(str(late)) from None
            reason = str(getattr(error, "os_error", error)) or type(error).__name__  # aiohttp's text repeats the host
            if isinstance(error, aiohttp.ServerTimeoutError):
                reason = "nobody accepts the connection"
            raise DroppedError(f"{self.name} was lost while {self.owner} waited for {what}: {reason}") from error
        if status != 200:
            self._raise(status, text, what)
        return text

    def _raise(self, status: int, text: bytes, what: str) -> NoReturn:
        """Raise the error for an HTTP status. The kind of an error is known only if our own routes sent it."""
        try:
            body = json.loads(text)
            reason, kind = str(body["error"]), str(body.get("kind", ""))
        except (ValueError, KeyError, TypeError):
            reason, kind = text[:200].decode(errors="replace"), None
        message = f"{self.name} answered with status {status} while {self.owner} waited for {what}: {reason}"
        if status == http.REFUSED:
            refused = DamagedError if kind == http.DAMAGED else ServerRefusedError
            raise refused(f"{self.name} refused {what}: {reason}")
        if status in DROPPED:
            raise DroppedError(message)
        if status >= http.FAILED:
            raise ServerLostError(message)
        raise self._foreign(message) if kind is None else RunError(message)

    def _foreign(self, message: str) -> RunError:
        """The error for an answer that is not ours: that of a proxy, once the server itself has answered."""
        return ServerLostError(message) if self.instance else RunError(message)


class DroppedError(ServerLostError):
    """A request did not get through, or its connection ended before the answer. A retry may help."""


def reasons(servers: Sequence[VllmServer]) -> str:
    """Why each lost server is lost, for an error message."""
    return "; ".join(server.lost for server in servers if server.lost is not None)
