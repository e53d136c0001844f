"""Rollouts from API servers that run independently of the trainer: collective calls, the same samples on every rank.

    engines = ServerEngines(config, parallel)                # rollout.servers = ["http://10.0.0.5:8000", ...]
    engines.push(source, version=0)
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))
    engines.close()

Rank 0 alone talks to the servers; all ranks gather each outcome before they go on. Prompts of a lost server go to the
others. When none is left, all ranks wait until one is back, push the weights into it, and sample what is missing. The
responses use the seeds of their prompts, so the samples equal those of an unbroken run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from oblr_megatron.engine.http_messages import DraftReport, Holding, Info
from oblr_megatron.engine.identity import ModelIdentity
from oblr_megatron.engine.protocol import PromptRequest, PushStats, SamplingRequest, api_key
from oblr_megatron.errors import DeadlineError, EngineLostError, EnginesGoneError, RunError
from oblr_megatron.memory.buffer_sizes import BUCKET_BYTES
from oblr_megatron.rollout.balance import MOST_PROMPTS, Balance
from oblr_megatron.rollout.dispatch import dispatch
from oblr_megatron.rollout.feed import Put
from oblr_megatron.rollout.push import Receiver, push
from oblr_megatron.rollout.recovery import RecoveringEngines
from oblr_megatron.rollout.server_checks import misfits
from oblr_megatron.rollout.server_client import VllmServer, reasons, silences
from oblr_megatron.rollout.server_push import ServerReceiver, SharedMemoryTransport, Transport
from oblr_megatron.runtime.collectives import Outcome, attempt
from oblr_megatron.runtime.http_loop import HttpLoop
from oblr_megatron.weights.manifest import manifest_of

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.adapter import AdapterShape
    from oblr_megatron.weights.manifest import Source

Value = TypeVar("Value")

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Seconds that a server may take to say whether it is there."""
LOST_SECONDS = 0.5
"""Seconds that a call waits for the answer of a lost server: a host that is down must not hold up every push."""
POLL_SECONDS = 0.5


class ServerEngines(RecoveringEngines):
    """All servers of a run; every rank calls every method with the same arguments."""

    _all = "the servers"

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        *,
        lora: AdapterShape | None = None,
        terminated: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the handles.

        Args:
            config: the run's.
            parallel: its ranks.
            lora: shape of adapters, if pushes are to be adapters.
            terminated: whether rank 0 is to end; it then waits for no server.

        Nothing is asked yet: `rollout.server_checks` did so before the run began.
        """
        super().__init__(config, parallel.rank)
        self._lora = lora
        self._transport = _transport(config, parallel)
        self._servers = _Servers(config, terminated) if parallel.rank == 0 else None
        self._holder = ""  # names this run to the servers, once it has pushed
        self._checksums: list[int | None] = []  # of the buckets of the weights being served; equal on all ranks
        self._behind = True  # no server is known to hold the weights

    def push(self, source: Source, version: int) -> PushStats:
        """See `RolloutEngine.push`. It succeeds when one server serves the weights; others may follow later."""
        self._holder = self._holder or self._from_first_rank(lambda _: secrets.token_hex(8), "the run's name", 0)
        return super().push(source, version)

    def close(self) -> None:
        """Close the connections; the servers go on. Not collective."""
        if self._servers is not None:
            self._servers.close()
        self._transport.close()

    def _holding(self, version: int) -> Holding:
        return Holding(holder=self._holder, version=version)

    def ready(self) -> None:
        """Wait until one server is there, and bring the weights into servers that came back."""
        if self._source is None:
            self._wait_for_servers()  # each time: one that was started again holds the checkpoint, too
        elif self._behind:
            self._deliver(self._source, self._version, check=True)
        self._behind = False

    def sampler(
        self, prompts: Sequence[Prompt], positions: Sequence[int], request: SamplingRequest, *, whole: bool
    ) -> Callable[[Put], None] | None:
        """The servers share the prompts by the number of tokens that each still has to sample."""
        servers = self._servers
        if servers is None:
            return None
        holding = self._holding(self._version)
        ids = {position: prompts[position].token_ids for position in positions}
        seconds = self._config.rollout.generate_timeout_s
        return lambda put: servers.sample(ids, request, holding, put, whole=whole, seconds=seconds)

    def reports(self) -> list[DraftReport]:
        return self._from_first_rank(
            lambda servers: servers.loop.run(servers.reports()), "the servers' speculation", PROBE_SECONDS
        )

    def _wait_for_servers(self) -> None:
        seconds = self._config.rollout.start_timeout_s
        self._restarts += self._from_first_rank(
            lambda servers: servers.loop.run(servers.wait_for_any(seconds)), "the servers", seconds
        )

    def _deliver(self, source: Source, version: int, *, check: bool = False) -> PushStats:
        """One push into all servers that are there, and a second one if a bucket arrived damaged.

        With `check` the source must still yield what it did at the first push of these weights.
        """
        self._wait_for_servers()
        pushes = [self._at_most_twice(partial(self._push_once, part, version)) for part in self._due(source)]
        stats, checksums = PushStats.total([stats for stats, _ in pushes]), pushes[-1][1]
        if check and checksums != self._checksums:
            self._unusable = f"the trainer's weights have changed since push {version}"
            raise RunError(f"{self._unusable}: a server that came back cannot be given the old ones")
        self._checksums, self._behind = checksums, False
        return stats

    def _lack_base(self) -> bool:
        def lack(servers: _Servers) -> bool:
            return any(server.base != self._holder for server in servers.present())

        return self._from_first_rank(lack, "the servers' base", PROBE_SECONDS)

    def _push_once(self, source: Source, version: int) -> tuple[PushStats, list[int | None]]:
        """Statistics of the push, and the checksums of its buckets, both from rank 0."""
        own = attempt(lambda: self._send(source, version))
        stats, checksums = self.gather(own, f"push {version}", 2 * self._config.rollout.push_timeout_s)[0].value
        return stats, checksums

    def _send(self, source: Source, version: int) -> tuple[PushStats | None, list[int | None]]:
        """This rank's part in a push. Both values are empty on ranks other than 0."""
        weights, manifest = self._config.weights, manifest_of(source)
        receiver = Receiver()
        if self._servers is not None:
            receiver = ServerReceiver(
                self._servers.present(),
                manifest,
                self._holding(version),
                model=self._config.model.path,
                loop=self._servers.loop,
                transport=self._transport,
                seconds=self._config.rollout.push_timeout_s,
                lora=self._lora,
            )
        capacity = self._transport.capacity(manifest)
        stats = push(receiver, source, capacity, verify=weights.verify)
        return stats, receiver.checksums if isinstance(receiver, ServerReceiver) else []

    def _from_first_rank(self, call: Callable[[_Servers], Value], what: str, seconds: float) -> Value:
        """Call on rank 0; every rank gets its result or its error."""
        servers = self._servers
        own: Outcome[Any] = Outcome() if servers is None else attempt(lambda: call(servers))
        return self.gather(own, what, seconds)[0].value


class _Servers:
    """The servers' handles and the event loop that they live in; on rank 0."""

    def __init__(self, config: Config, terminated: Callable[[], bool] = lambda: False) -> None:
        key, (silence_s, hang_s) = api_key(), silences(config.rollout)
        self.servers = [VllmServer(url, key, silence_s=silence_s, hang_s=hang_s) for url in config.rollout.servers]
        self._config, self._terminated = config, terminated
        # read once, outside the loop, where slow storage would stop the other servers' questions; it may disappear
        self._model = ModelIdentity.of(config.model.path)
        self._known: set[VllmServer] = set()  # servers that have answered before
        self._open: dict[VllmServer, asyncio.Task[Info | RunError]] = {}  # questions that no probe waited for
        self.loop = HttpLoop()

    def present(self) -> list[VllmServer]:
        """Servers that are not known to be lost."""
        return [server for server in self.servers if server.lost is None]

    async def wait_for_any(self, seconds: float) -> int:
        """Ask all servers until one answers. Returns how many of the servers that answer had been lost.

        Raises:
            EnginesGoneError: none answered in time, or none can be used, or none is there and the run is to end.
        """
        deadline = time.monotonic() + seconds
        while True:
            back = await asyncio.gather(*map(self._probe, self.servers))
            if self.present():
                return sum(back)
            if all(server.unfit for server in self.servers):
                raise EnginesGoneError(f"no server can be used: {reasons(self.servers)}")
            if self._terminated():  # a preemption ends servers and trainers: what is left of it goes to the save
                raise EnginesGoneError(f"SIGTERM, and no server is there: {reasons(self.servers)}")
            if time.monotonic() > deadline:
                error = DeadlineError("rank 0", "one of the servers to answer", seconds)
                raise EnginesGoneError(f"{error}: {reasons(self.servers)}")
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self, server: VllmServer) -> bool:
        """Ask a server for its settings, which a restart may have changed. Returns whether it was lost and is back.

        A lost one gets `LOST_SECONDS`, unless it has answered an earlier question in the meantime.
        """
        earlier, asked = self._open.pop(server, None), asyncio.create_task(_settings(server))
        late = earlier is not None and earlier.done() and isinstance(earlier.result(), Info)
        if server.lost is not None and not late:
            await asyncio.wait([asked], timeout=LOST_SECONDS)
            if not asked.done():
                self._open[server] = asked if earlier is None or earlier.done() else earlier
                return False
        answer = await asked
        if isinstance(answer, RunError):
            server.lose(str(answer), unfit=not isinstance(answer, EngineLostError))
            return False
        for what, fix in misfits(answer, self._config, self._model):
            server.lose(f"{server.name} {what}: {fix}", unfit=True)
            return False
        returns = server.lost is not None and server in self._known
        server.lost = None
        self._known.add(server)
        if returns:
            logger.warning("%s is back, and gets the weights again", server.name)
        return returns

    async def reports(self) -> list[DraftReport]:
        """One report from each server that answers; the next batch notices those that do not."""
        reports = []
        for server in self.present():
            try:
                reports.append(await server.speculation(PROBE_SECONDS))
            except RunError as error:
                logger.warning("no report of its speculation: %s", error)
        return reports

    def sample(
        self,
        prompts: Mapping[int, Sequence[int]],
        request: SamplingRequest,
        holding: Holding,
        put: Put,
        *,
        whole: bool,
        seconds: float,
    ) -> None:
        """Sample the prompts, given by their positions in the batch, on the servers that are not lost."""
        positions, ids = list(prompts), list(prompts.values())
        costs = [len(prompt) + request.group_size * request.max_tokens for prompt in ids]
        sequences = 1 if request.greedy else request.group_size
        capacities = [0 if server.lost is not None else server.capacity for server in self.servers]
        balance = Balance(costs, capacities, sequences, together=MOST_PROMPTS if whole else 1)

        async def ask(server: VllmServer, items: tuple[int, ...], left: float) -> list[list[Sample]]:
            asked = tuple(PromptRequest(n, tuple(ids[n]), request, positions[n]) for n in items)
            return await server.sample(asked, holding, left)

        def store(item: int, group: list[Sample]) -> None:
            put(positions[item], group)

        what = f"{len(ids)} x {request.group_size} samples"
        self.loop.run(dispatch(self.servers, balance, ask, store, what=what, seconds=seconds))

    def close(self) -> None:
        """Close the connections and the loop."""
        if not self.loop.closed:
            for server in self.servers:
                self.loop.run(server.close())
        self.loop.close()


async def _settings(server: VllmServer) -> Info | RunError:
    try:
        return await server.info(PROBE_SECONDS)
    except RunError as error:
        return error


def _transport(config: Config, parallel: Parallel) -> Transport:
    if parallel.device.type != "cuda":
        return SharedMemoryTransport(BUCKET_BYTES)
    from oblr_megatron.rollout.nccl_push import NcclTransport

    return NcclTransport(BUCKET_BYTES, parallel.device, config.rollout.push_timeout_s)
