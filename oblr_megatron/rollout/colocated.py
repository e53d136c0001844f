"""The rollout engines of a run, beside the trainer's ranks: collective calls, the same samples on every rank.

    engines = ColocatedEngines(config, parallel)             # starts the processes, and returns
    engines.push(source, version=0)
    samples = engines.generate(prompts, SamplingRequest(group_size=8, temperature=1.0, max_tokens=256, seed=7))
    engines.sleep(config.rollout.sleep_level)                # on GPUs: the trainer's turn with the memory
    engines.close()

Engine e is owned by one rank, which alone speaks to it: on GPUs the first of its block of tensor_parallel_size ranks,
on a CPU rank e. What an owner learns, good or bad, all ranks hear before any of them goes on. So an engine that died or
hung is started again by its owner while the others wait for it, all ranks push the weights once more, and what it still
owed is sampled; with the seeds of the prompts, which give the samples of an unbroken run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from oblr_megatron.engine.gpu_memory import give_back_cached
from oblr_megatron.engine.handle import Deadlines, VllmEngine
from oblr_megatron.engine.protocol import PushStats, RolloutEngine, SamplingRequest
from oblr_megatron.errors import DamagedError, EngineLostError, RunError
from oblr_megatron.rollout.placement import engine_spec, place
from oblr_megatron.rollout.push import Pusher
from oblr_megatron.rollout.recovery import Recovery
from oblr_megatron.rollout.staleness import check_batch
from oblr_megatron.runtime.collectives import Collectives, Outcome, attempt, raise_first

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.manifest import Source

Value = TypeVar("Value")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What an engine frees and takes back, in vLLM's words."""


class ColocatedEngines(RolloutEngine):
    """All engines of a run; every rank calls every method, with the same arguments."""

    def __init__(self, config: Config, parallel: Parallel) -> None:
        """Start the engine processes. On a CPU the first call waits until they are ready, and the ranks can build their
        models meanwhile; on GPUs this waits, since vLLM measures what memory is free and must be alone while it does.

        Raises:
            UserError: the engines do not fit the ranks.
            RunError: an engine did not start.
        """
        self._config, self._parallel = config, parallel
        self._on_gpu = parallel.device.type == "cuda"
        self._placement = place(config, parallel.world_size, on_gpu=self._on_gpu)
        self._deadlines = _deadlines(config)
        self._collectives = Collectives(parallel.rank)
        self._recovery = Recovery(config.rollout.max_restarts, tells=parallel.rank == 0)
        self._version = self._restarts = 0
        self._source: Source | None = None  # of the weights being served; None: the checkpoint
        self._ready = False  # every engine has started, and none is known to be lost
        self._behind = False  # an engine was started again and serves the checkpoint
        self._asleep: frozenset[str] = frozenset()
        self._unusable: str | None = None
        self._index = self._placement.engine_of(parallel.rank)
        self._engine = None if self._index is None else self._launch(self._index)
        self._pusher = Pusher(self._engine, parallel.device, config.weights)
        if self._on_gpu:
            try:
                self._until_done(lambda: None)
            except BaseException:
                self.close()  # an engine that did start holds GPU memory, and nobody else knows of it yet
                raise

    @property
    def version(self) -> int:
        """Of the weights that all engines serve; 0 is the checkpoint they started from."""
        return self._version

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        """See `RolloutEngine.generate`; each engine samples a contiguous share of the prompts."""
        if self._unusable is not None:
            raise RunError(self._unusable)
        shares: dict[int, list[Sample]] = {}  # by engine; what one has sampled is kept when another is lost
        self._until_done(lambda: self._sample_rest(prompts, request, shares))
        self._recovery.sampled()
        samples = [sample for _, share in sorted(shares.items()) for sample in share]
        check_batch(samples, len(prompts) * request.group_size, self._version)
        return samples

    def push(self, source: Source, version: int) -> PushStats:
        """See `RolloutEngine.push`; the seconds are those of the slowest engine."""
        self._unusable = f"push {version} did not reach every engine; generate again after one that does"
        stats = self._until_done(lambda: self._deliver(source, version))
        self._source, self._version, self._unusable = source, version, None
        return stats

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory once no more is sampled from these weights; does nothing on a CPU, or at level 0.

        Args:
            level: 1: the weights are kept in host memory; 2: they are dropped, and a push must follow. The next push
                and the next generate wake the engines by themselves, a stage each.
        """
        if not self._on_gpu or level == 0:
            return
        self._asleep = frozenset((WEIGHTS, KV_CACHE))
        if level > 1:
            self._unusable = f"sleep level {level} dropped the weights; generate again after a push"
        try:
            self._on_owners(
                lambda engine, _: engine.sleep(level), "the engines to sleep", seconds=self._deadlines.sleep
            )
        except EngineLostError as error:  # its memory is free all the same; it starts again when it is needed
            self._note_loss(error)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory back, of those tags that are asleep: ("weights",), ("kv_cache",), or None for all."""
        tags = tuple(sorted(self._asleep.intersection(tags or self._asleep), reverse=True))  # the weights first
        if not tags:
            return
        give_back_cached()
        self._on_owners(lambda engine, _: engine.wake(tags), "the engines to wake", seconds=self._deadlines.sleep)
        self._asleep -= set(tags)

    def metrics(self) -> dict[str, float]:
        """How often an engine was started again since the last call, all engines together."""
        restarts, self._restarts = self._restarts, 0
        return {"rollout/restarts": restarts}

    def close(self) -> None:
        """End this rank's engine. Not collective: ranks may close at any time, also after an error."""
        if self._engine is not None:
            self._engine.close()

    def _until_done(self, call: Callable[[], Value]) -> Value:
        """Call with all engines there, and again with all engines there after a loss, up to the limit."""

        def once() -> Value:
            try:
                self._bring_up()
                return call()
            except EngineLostError:
                self._ready, self._behind = False, True
                raise

        return self._recovery.until_done(once)

    def _note_loss(self, error: EngineLostError) -> None:
        self._ready, self._behind = False, True
        self._recovery.count(error)

    def _bring_up(self) -> None:
        """Wait for engines that start; those that were lost start again, as servers of the checkpoint."""
        if self._ready:
            return
        give_back_cached()  # on every rank: an engine may span the devices of several
        self._restarts += sum(self._on_owners(self._start_again, "the engines to be launched", seconds=0))
        self._on_owners(lambda engine, _: engine.wait_ready(), "the engines to start", seconds=self._deadlines.start)
        self._ready = True

    def _start_again(self, engine: VllmEngine, index: int) -> bool:
        if not engine.lost or self._recovery.over:
            return False
        self._engine = self._launch(index, restart=engine.restart + 1)
        self._pusher = Pusher(self._engine, self._parallel.device, self._config.weights)
        return True

    def _launch(self, index: int, restart: int = 0) -> VllmEngine:
        spec = engine_spec(self._config, self._parallel, index, self._placement)
        log = self._config.run_dir / "logs" / f"engine-{index}.log"
        owner = f"rank {self._parallel.rank}"
        return VllmEngine(spec, owner=owner, log=log, deadlines=self._deadlines, restart=restart)

    def _sample_rest(
        self, prompts: Sequence[Prompt], request: SamplingRequest, shares: dict[int, list[Sample]]
    ) -> None:
        """Have the engines whose share is missing sample it; the shares that come are kept whatever the others do."""

        def sample(engine: VllmEngine, index: int) -> list[Sample] | None:
            if index in shares:
                return None
            share = self._placement.share(len(prompts), index)
            ids = [prompt.token_ids for prompt in prompts[share]]
            groups = engine.generate(ids, replace(request, first_group=share.start)) if ids else []
            return [sample for group in groups for sample in group]

        if self._behind and self._source is not None:
            self._deliver(self._source, self._version)
        self._behind = False
        self.wake()
        what = f"{len(prompts)} x {request.group_size} samples"
        outcomes, own = self._gather(sample, what, seconds=self._deadlines.generate)
        for index, owner in enumerate(self._placement.owners):
            if outcomes[owner].value is not None:
                shares[index] = outcomes[owner].value
        raise_first(outcomes, own)

    def _deliver(self, source: Source, version: int) -> PushStats:
        """One push into all engines; one more if a bucket arrived damaged."""
        self.wake((WEIGHTS,))
        try:
            stats = self._push_once(source, version)
        except DamagedError:
            stats = self._push_once(source, version)
        self._behind = False
        return stats

    def _push_once(self, source: Source, version: int) -> PushStats:
        own = attempt(partial(self._pusher.push, source, version))
        seconds = 2 * self._deadlines.push  # to break off a push that failed takes a deadline of its own
        outcomes = self._gather_from(own, f"push {version}", seconds)
        raise_first(outcomes, own)
        stats = [outcomes[owner].value for owner in self._placement.owners]
        return replace(stats[0], seconds=max(part.seconds for part in stats))

    def _on_owners(self, call: Callable[[VllmEngine, int], Value], what: str, *, seconds: float) -> list[Value]:
        """Run something on each engine's owner; every rank gets all results, in the order of the engines."""
        outcomes, own = self._gather(call, what, seconds)
        raise_first(outcomes, own)
        return [outcomes[owner].value for owner in self._placement.owners]

    def _gather(
        self, call: Callable[[VllmEngine, int], Value], what: str, seconds: float
    ) -> tuple[list[Outcome[Any]], Outcome[Any]]:
        """(every rank's outcome, this rank's own) of a call that only owners make."""

        def here() -> Value | None:
            return None if self._engine is None or self._index is None else call(self._engine, self._index)

        own = attempt(here)
        return self._gather_from(own, what, seconds), own

    def _gather_from(self, own: Outcome[Any], what: str, seconds: float) -> list[Outcome[Any]]:
        """As patient as the engines' deadline and the trainer's own collectives together: ranks do not come at once."""
        patience = seconds + self._config.parallel.distributed_timeout_s
        return self._collectives.gather(own, what=what, seconds=patience)


def _deadlines(config: Config) -> Deadlines:
    rollout = config.rollout
    return Deadlines(
        rollout.start_timeout_s, rollout.generate_timeout_s, rollout.push_timeout_s, rollout.sleep_timeout_s
    )
