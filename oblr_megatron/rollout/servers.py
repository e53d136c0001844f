"""Rollouts from API servers that somebody else started: collective calls, the same samples on every rank.

    engines = ServerEngines(config, parallel)                # rollout.servers = ["http://10.0.0.5:8000", ...]
    engines.push(source, version=0)
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))
    engines.close()

Rank 0 alone speaks to the servers. What it learns, good or bad, all ranks hear before any of them goes on. Prompts of a
server that is lost go to the others; when none is left, all ranks wait for one to come back, push the weights into it,
and what is missing is sampled; with the seeds of the prompts, which give the samples of an unbroken run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from oblr_megatron.engine.http_messages import GenerateBody, Holding
from oblr_megatron.engine.protocol import PushStats, RolloutEngine, SamplingRequest
from oblr_megatron.errors import DeadlineError, EngineLostError, RunError
from oblr_megatron.rollout.balance import Balance
from oblr_megatron.rollout.dispatch import dispatch
from oblr_megatron.rollout.recovery import Recovery
from oblr_megatron.rollout.server_client import VllmServer, reasons
from oblr_megatron.rollout.server_push import ServerPusher, SharedMemoryTransport, Transport, push
from oblr_megatron.rollout.staleness import check_batch
from oblr_megatron.runtime.collectives import Collectives, Outcome, attempt, raise_first
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.names import ModelShape

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.manifest import Source

Value = TypeVar("Value")

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How long a server may take to say whether it is back."""
POLL_SECONDS = 0.5


class ServerEngines(RolloutEngine):
    """All servers of a run; every rank calls every method, with the same arguments."""

    def __init__(self, config: Config, parallel: Parallel) -> None:
        """Make the handles; nothing is asked yet, `rollout.server_checks` has done so before the run began."""
        self._config, self._rank = config, parallel.rank
        self._collectives = Collectives(parallel.rank)
        self._recovery = Recovery(config.rollout.max_restarts, tells=parallel.rank == 0)
        self._transport = _transport(config, parallel)
        self._servers = _Servers(config, self._transport) if parallel.rank == 0 else None
        self._verify = _shape(config) if config.weights.verify else None
        self._holding = Holding()
        self._source: Source | None = None  # of the weights being served; None: the checkpoint
        self._checksums: list[int | None] = []  # of its buckets, on rank 0
        self._behind = True  # no server is known to hold the weights
        self._restarts = 0
        self._unusable: str | None = None

    @property
    def version(self) -> int:
        """Of the weights that all engines serve; 0 is the checkpoint they started from."""
        return self._holding.version

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """See `RolloutEngine.generate`; the servers share the prompts by the tokens they have outstanding."""
        if self._unusable is not None:
            raise RunError(self._unusable)
        ids = [prompt.token_ids for prompt in prompts]
        costs = [len(prompt) + request.group_size * request.max_tokens for prompt in ids]
        balance = Balance(costs, [], 1 if request.greedy else request.group_size)
        samples = self._until_done(lambda: self._sample_rest(ids, request, balance))
        self._recovery.sampled()
        check_batch(samples, len(prompts) * request.group_size, self.version)
        return samples

    def push(self, source: Source, version: int) -> PushStats:
        """See `RolloutEngine.push`; it has succeeded when one server serves the weights, others may follow."""
        self._unusable = f"push {version} did not reach the servers; generate again after one that does"
        holder = self._holding.holder or self._from_first_rank(lambda _: secrets.token_hex(8), "the run's name", 0)
        holding = Holding(holder=holder, version=version)
        stats = self._until_done(lambda: self._deliver(source, holding, check=False))
        self._source, self._holding, self._unusable = source, holding, None
        return stats

    def sleep(self, level: int = 1) -> None:
        """Nothing: servers have their memory for themselves."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Nothing either."""

    def metrics(self) -> dict[str, float]:
        """How many servers were given the weights again after they had been lost, since the last call."""
        restarts, self._restarts = self._restarts, 0
        return {"rollout/restarts": restarts}

    def close(self) -> None:
        """Close the connections; the servers go on. Not collective."""
        if self._servers is not None:
            self._servers.close()
        self._transport.close()

    def _until_done(self, call: Callable[[], Value]) -> Value:
        """Call, and after the loss of all servers again when one is back, up to the limit."""

        def once() -> Value:
            try:
                return call()
            except EngineLostError:
                self._behind = True
                raise

        return self._recovery.until_done(once)

    def _sample_rest(
        self, prompts: Sequence[Sequence[int]], request: SamplingRequest, balance: Balance
    ) -> list[Sample]:
        if self._behind and self._source is not None:
            self._deliver(self._source, self._holding, check=True)
        elif self._behind:
            self._wait_for_servers()
        self._behind = False
        seconds = self._config.rollout.generate_timeout_s
        what = f"{len(prompts)} x {request.group_size} samples"

        def sample(servers: _Servers) -> list[Sample]:
            return servers.sample(prompts, request, balance, self._holding, what=what, seconds=seconds)

        return self._from_first_rank(sample, what, seconds)

    def _wait_for_servers(self) -> None:
        seconds = self._config.rollout.start_timeout_s
        self._restarts += self._from_first_rank(lambda servers: servers.wait_for_any(seconds), "the servers", seconds)

    def _deliver(self, source: Source, holding: Holding, *, check: bool) -> PushStats:
        """One push into all servers that are there, on every rank.

        Args:
            source: of the weights.
            holding: their name.
            check: whether the source must yield what it did when these weights were first pushed.
        """
        self._wait_for_servers()
        servers = self._servers
        own = attempt(
            lambda: push(
                None if servers is None else servers.pusher,
                self._transport,
                source,
                holding,
                [] if servers is None else servers.present(),
                checksum=self._config.weights.checksum,
                verify=self._verify,
            )
        )
        outcomes = self._gather(own, f"push {holding.version}", 2 * self._config.rollout.push_timeout_s)
        raise_first(outcomes, own)
        stats, checksums = outcomes[0].value
        if check and checksums != self._checksums:
            self._unusable = f"the trainer's weights have changed since push {holding.version}"
            raise RunError(f"{self._unusable}: a server that came back cannot be given the old ones")
        self._checksums, self._behind = checksums, False
        return stats

    def _from_first_rank(self, call: Callable[[_Servers], Value], what: str, seconds: float) -> Value:
        """Have rank 0 do something; all ranks get what it returned, or the error it ended with."""
        servers = self._servers
        own: Outcome[Any] = Outcome() if servers is None else attempt(lambda: call(servers))
        outcomes = self._gather(own, what, seconds)
        raise_first(outcomes, own)
        return outcomes[0].value

    def _gather(self, own: Outcome[Any], what: str, seconds: float) -> list[Outcome[Any]]:
        patience = seconds + self._config.parallel.distributed_timeout_s
        return self._collectives.gather(own, what=what, seconds=patience)


class _Servers:
    """What rank 0 has: the handles, the loop they live in, and the feeding end of a push."""

    def __init__(self, config: Config, transport: Transport) -> None:
        key = os.environ.get(config.rollout.api_key_env, "")
        self.servers = [VllmServer(url, key) for url in config.rollout.servers]
        self._known: set[VllmServer] = set()  # that have been there before
        self._loop = HttpLoop()
        self.pusher = ServerPusher(self._loop, transport, config.rollout.push_timeout_s)

    def present(self) -> list[VllmServer]:
        """Servers that are not known to be lost."""
        return [server for server in self.servers if server.lost is None]

    def wait_for_any(self, seconds: float) -> int:
        """Look which servers are there, until one is; how many of them had been lost.

        Raises:
            DeadlineError: none came.
        """
        return self._loop.run(self._wait_for_any(seconds))

    async def _wait_for_any(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while True:
            back = await asyncio.gather(*map(self._probe, self.servers))
            if self.present():
                return sum(back)
            if all(server.unfit for server in self.servers):
                raise RunError(f"no server can be used: {reasons(self.servers)}")
            if time.monotonic() > deadline:
                error = DeadlineError("rank 0", "one of the servers to be there", seconds)
                raise RunError(f"{error}: {reasons(self.servers)}")
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self, server: VllmServer) -> bool:
        """Ask a server what it can do; whether it has come back after a loss."""
        returns = server.lost is not None and server in self._known
        try:
            await server.info(PROBE_SECONDS)
        except RunError as error:
            server.lose(str(error), unfit=not isinstance(error, EngineLostError))
            return False
        server.lost = None
        self._known.add(server)
        if returns:
            logger.warning("%s is back, and gets the weights anew", server.name)
        return returns

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        request: SamplingRequest,
        balance: Balance,
        holding: Holding,
        *,
        what: str,
        seconds: float,
    ) -> list[Sample]:
        """What `balance` lacks, from the servers that are there; all samples in prompt-major order."""
        balance.restart([0 if server.lost is not None else server.capacity for server in self.servers])

        async def ask(server: VllmServer, items: tuple[int, ...], left: float) -> list[list[Sample]]:
            body = GenerateBody.of(holding, request, [prompts[item] for item in items], items)
            return await server.generate(body, left)

        self._loop.run(dispatch(self.servers, balance, ask, what=what, seconds=seconds))
        return [sample for group in balance.results() for sample in group]

    def close(self) -> None:
        """Close the connections and the loop."""
        if not self._loop.closed:
            for server in self.servers:
                self._loop.run(server.close())
        self._loop.close()


def _shape(config: Config) -> ModelShape:
    return ModelShape.of(json.loads((config.model.path / "config.json").read_text(encoding="utf-8")))


def _transport(config: Config, parallel: Parallel) -> Transport:
    bucket_bytes = config.weights.bucket_mib * 2**20
    if parallel.device.type != "cuda":
        return SharedMemoryTransport(bucket_bytes)
    from oblr_megatron.rollout.nccl_push import NcclTransport

    return NcclTransport(bucket_bytes, parallel.device)
