"""The rollout engines of a run, next to the trainer's ranks: collective calls, the same samples on every rank.

    engines = ColocatedEngines(config, parallel)             # starts the processes, and returns
    engines.push(source, version=0)
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))
    engines.sleep(config.rollout.sleep_level)                # on GPUs: the trainer needs the memory now
    engines.close()

One rank owns each engine and alone talks to it: on GPUs the first of its block of tensor_parallel_size ranks, on a CPU
rank e for engine e. All ranks gather each outcome before they go on. When an engine dies or hangs, its owner restarts
it, all ranks push the weights again, and the missing responses are sampled. They use the seeds of their prompts, so the
samples equal those of an unbroken run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from oblr_megatron.checks.run_dir import LOGS
from oblr_megatron.engine.handle import Deadlines, VllmEngine
from oblr_megatron.engine.http_messages import DraftReport
from oblr_megatron.engine.protocol import PushStats, SamplingRequest
from oblr_megatron.environments.host import EpisodeHost
from oblr_megatron.errors import EngineLostError, RunError
from oblr_megatron.model.parallel import local_world_size
from oblr_megatron.rollout.feed import Groups, Put
from oblr_megatron.rollout.placement import engine_spec, place
from oblr_megatron.rollout.push import Pusher
from oblr_megatron.rollout.recovery import RecoveringEngines
from oblr_megatron.runtime.collectives import Outcome, attempt

if TYPE_CHECKING:
    from pathlib import Path

    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.rollout import Waiting
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.adapter import AdapterShape
    from oblr_megatron.weights.manifest import Source

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
SLEEP_TIMEOUT_S = 120.0  # for an engine to free or reclaim its GPU memory

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags for the memory that an engine frees and takes back."""


class ColocatedEngines(RecoveringEngines):
    """All engine processes of a run; every rank calls every method with the same arguments."""

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        waiting: Waiting = nullcontext,
        *,
        lora: AdapterShape | None = None,
        adapter: Path | None = None,
    ) -> None:
        """Start the engine processes.

        Args:
            config: of the run.
            parallel: of this rank.
            waiting: shows what the ranks wait for.
            lora: the shape of adapters, if pushes are to be adapters.
            adapter: directory of an adapter of this shape, from which they sample before a push.

        On a CPU the first call waits until they are ready, so the ranks can build their models meanwhile. On GPUs this
        waits: vLLM measures the free memory, and nothing else may allocate while it does.

        Raises:
            UserError: the engines do not fit the ranks.
            RunError: an engine did not start.
        """
        super().__init__(config, parallel.rank)
        self._parallel, self._waiting, self._lora, self._adapter = parallel, waiting, lora, adapter
        self._on_gpu = parallel.device.type == "cuda"
        self._placement = place(config, parallel.world_size, local_world_size(parallel.world_size), on_gpu=self._on_gpu)
        limits = config.rollout
        self._deadlines = Deadlines(
            limits.start_timeout_s, limits.generate_timeout_s, limits.push_timeout_s, SLEEP_TIMEOUT_S
        )
        self._ready = False  # every engine has started, and none is known to be lost
        self._have_base = False  # every engine holds the weights that adapters need
        self._asleep: frozenset[str] = frozenset()
        self._index = self._placement.engine_of(parallel.rank)
        self._engine = None if self._index is None else self._launch()
        self._pusher = Pusher(self._engine, parallel.device, config.weights)
        self._episodes: EpisodeHost | None = None
        if self._index is not None and limits.environment.function:
            self._episodes = EpisodeHost(config, index=self._index, owner=f"rank {parallel.rank}")
        if self._on_gpu:
            try:
                self.until_done(lambda: None)
            except BaseException:  # an engine that did start holds GPU memory, and no one else can end it yet
                self.close()
                raise

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory once these weights are no longer sampled from; does nothing on a CPU, or at level 0.

        The next push wakes the weights, and the next generate the KV cache.
        """
        if not self._on_gpu or level == 0:
            return
        self._asleep = frozenset((WEIGHTS, KV_CACHE))
        if level > 1:
            self._have_base = False
            self._unusable = f"sleep level {level} dropped the weights; generate again after a push"
        seconds = self._deadlines.sleep
        try:
            self._on_owners(lambda engine: engine.sleep(level), "the engines to sleep", seconds=seconds)
        except EngineLostError as error:  # its memory is free, too; it is restarted when it is needed
            self._note_loss()
            self.recovery.count(error)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory back for those of the tags that are asleep: ("weights",), ("kv_cache",), or None for all."""
        asleep = sorted(self._asleep.intersection(tags or self._asleep), reverse=True)  # weights first
        if not asleep:
            return
        # An engine may use the devices of several ranks: it wakes once each of them has freed its memory.
        self.gather(attempt(_free_cached_memory), "the trainer to free GPU memory", seconds=0)
        self._on_owners(lambda engine: engine.wake(asleep), "the engines to wake", seconds=self._deadlines.sleep)
        self._asleep -= set(asleep)

    def close(self) -> None:
        """End this rank's engine. Not collective: a rank may close at any time, also after an error."""
        if self._engine is not None:
            self._engine.close()
        if self._episodes is not None:
            self._episodes.close()

    def _note_loss(self) -> None:
        super()._note_loss()
        self._ready = self._have_base = False

    def _bring_up(self) -> None:
        """Wait for engines that are starting. Lost engines are restarted first; they serve the checkpoint then."""
        if self._ready:
            return
        _free_cached_memory()  # on every rank: an engine may use the devices of several
        self._restarts += sum(self._on_owners(self._start_again, "the engines to be launched", seconds=0))
        number, logs, seconds = len(self._placement.owners), self._config.run_dir / LOGS, self._deadlines.start
        with self._waiting(f"starting {number} engine{'s' if number > 1 else ''} (log: {logs}/engine-*.log)"):
            self._on_owners(VllmEngine.wait_ready, "the engines to start", seconds=seconds)
        self._ready = True

    def _start_again(self, engine: VllmEngine) -> bool:
        if not engine.lost or self.recovery.over:
            return False
        self._engine = self._launch(restart=engine.restart + 1)
        self._pusher = Pusher(self._engine, self._parallel.device, self._config.weights)
        return True

    def _launch(self, restart: int = 0) -> VllmEngine:
        assert self._index is not None, "this rank owns an engine"
        spec = engine_spec(self._config, self._parallel, self._index, self._placement)
        spec = replace(spec, lora=self._lora, adapter=self._adapter)
        log = self._config.run_dir / LOGS / f"engine-{self._index}.log"
        owner = f"rank {self._parallel.rank}"
        return VllmEngine(spec, owner=owner, log=log, deadlines=self._deadlines, restart=restart)

    def ready(self) -> None:
        """Bring the weights into an engine that was restarted, and wake all engines."""
        if self._behind and self._source is not None:
            self._deliver(self._source, self._version)
        self._behind = False
        self.wake()

    def sampler(
        self, prompts: Sequence[Prompt], positions: Sequence[int], request: SamplingRequest, *, whole: bool
    ) -> Callable[[Put], None] | None:
        """Each engine samples its part of a contiguous division of the batch."""
        engine, index = self._engine, self._index
        if engine is None or index is None:
            return None
        share = self._placement.share(len(prompts), index)
        mine = [position for position in positions if share.start <= position < share.stop]
        ids = [prompts[position].token_ids for position in mine]
        episodes, version = self._episodes, self._version

        def run(put: Put) -> None:
            if episodes is not None:
                groups_of_episodes: Groups = {}
                store = groups_of_episodes.__setitem__ if whole else put
                episodes.sample(engine, prompts, mine, request, store, version=version)
                groups: Iterable[tuple[int, list[Sample]]] = sorted(groups_of_episodes.items())
            else:
                groups = engine.stream(ids, mine, request) if ids else ()
            # With `whole`, a lost engine has put nothing, and its whole share is sampled again: the same batch gives
            # the same samples to the bit.
            for position, group in list(groups) if whole else groups:
                put(position, group)

        return run

    def reports(self) -> list[DraftReport]:
        """See `RecoveringEngines.reports`. An engine that was lost says nothing; the next call restarts it."""

        def told(engine: VllmEngine) -> DraftReport | None:
            try:
                return engine.speculation()
            except RunError:
                return None

        reports = self._on_owners(told, "the engines' speculation", seconds=self._deadlines.sleep)
        if None in reports:
            self._note_loss()
        return [report for report in reports if report is not None]

    def _deliver(self, source: Source, version: int) -> PushStats:
        """One push into all engines, and a second one if a bucket arrived damaged."""
        self.wake((WEIGHTS,))
        stats = [self._at_most_twice(partial(self._push_once, part, version)) for part in self._due(source)]
        self._behind, self._have_base = False, True
        return PushStats.total(stats)

    def _lack_base(self) -> bool:
        return not self._have_base

    def _push_once(self, source: Source, version: int) -> PushStats:
        own = attempt(partial(self._pusher.push, source, version))
        if isinstance(own.exception, torch.OutOfMemoryError):  # others wait in a collective, not for the outcome
            raise own.exception
        if own.exception is not None and not isinstance(own.exception, RunError):  # others may wait in a collective
            logger.error("push %d failed on rank %d: %s", version, self._parallel.rank, own.error)
        seconds = 2 * self._deadlines.push  # giving up a failed push has a deadline of its own
        outcomes = self.gather(own, f"push {version}", seconds)
        stats = [outcomes[owner].value for owner in self._placement.owners]
        return replace(stats[0], seconds=max(part.seconds for part in stats))

    def _on_owners(self, call: Callable[[VllmEngine], Value], what: str, *, seconds: float) -> list[Value]:
        """Call on each engine's owner. Every rank gets all results, in the order of the engines."""
        engine = self._engine
        own: Outcome[Any] = Outcome() if engine is None else attempt(lambda: call(engine))
        outcomes = self.gather(own, what, seconds)
        return [outcomes[owner].value for owner in self._placement.owners]


def _free_cached_memory() -> None:
    """Return torch's cached memory to the device: an engine that starts or wakes can use only what is free."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
