"""The rollout engines of a run, beside the trainer's ranks: collective calls, the same samples on every rank.

    engines = ColocatedEngines(config, parallel)             # starts the processes, and returns
    engines.push(source, version=0)
    samples = engines.generate(prompts, group_size=8, temperature=1.0, max_tokens=256, seed=7)   # N = Q * 8
    engines.close()

Engine e is owned by one rank, which alone speaks to it: on GPUs the first of its block of tensor_parallel_size ranks,
on a CPU rank e. What an owner learns, good or bad, all ranks hear before any of them goes on; so a dead engine ends
every rank with the same error, and none waits for a result that will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from oblr_megatron.errors import RunError
from oblr_megatron.rollout.engine import PushStats, RolloutEngine, SamplingRequest
from oblr_megatron.rollout.placement import engine_spec, place
from oblr_megatron.rollout.push import Pusher
from oblr_megatron.rollout.vllm_local import Deadlines, VllmEngine

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample
    from oblr_megatron.weights.manifest import Source

Value = TypeVar("Value")

EXCHANGE_SLACK_S = 120.0
"""Added to the longest deadline of an engine, for the collective in which the other ranks hear of it."""


class ColocatedEngines(RolloutEngine):
    """All engines of a run; every rank calls every method, with the same arguments."""

    def __init__(self, config: Config, parallel: Parallel) -> None:
        """Start the engine processes. On a CPU the first call waits until they are ready, and the ranks can build their
        models meanwhile; on GPUs this waits, since vLLM measures what memory is free and must be alone while it does.

        Raises:
            UserError: the engines do not fit the ranks.
            RunError: an engine did not start.
        """
        self._config, self._rank = config, parallel.rank
        self._placement = place(config, parallel.world_size, on_gpu=parallel.device.type == "cuda")
        self._deadlines = _deadlines(config)
        self._group = _exchange_group(self._deadlines)
        self._version = 0
        self._unusable: str | None = None
        index = self._placement.engine_of(parallel.rank)
        self._index = index
        self._engine = None if index is None else self._launch(index, parallel)
        self._pusher = Pusher(self._engine, parallel.device)
        if parallel.device.type == "cuda":
            try:
                self._on_owners(lambda engine, _: engine.wait_ready())
            except BaseException:
                self.close()  # an engine that did start holds GPU memory, and nobody else knows of it yet
                raise

    @property
    def version(self) -> int:
        """Of the weights that all engines serve; 0 is the checkpoint they started from."""
        return self._version

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        temperature: float,
        max_tokens: int,
        seed: int,
        greedy: bool = False,
    ) -> list[Sample]:
        """See `RolloutEngine.generate`; each engine samples a contiguous share of the prompts."""
        if self._unusable is not None:
            raise RunError(self._unusable)
        rollout = self._config.rollout
        request = SamplingRequest(
            group_size, 0.0 if greedy else temperature, max_tokens, seed, top_p=rollout.top_p, top_k=rollout.top_k
        )

        def sample(engine: VllmEngine, index: int) -> list[Sample]:
            share = self._placement.share(len(prompts), index)
            ids = [prompt.token_ids for prompt in prompts[share]]
            groups = engine.generate(ids, replace(request, first_group=share.start)) if ids else []
            return [sample for group in groups for sample in group]

        parts = self._on_owners(sample)
        samples = [sample for part in parts for sample in part]
        stale = {sample.version for sample in samples} - {self._version}
        if stale or len(samples) != len(prompts) * group_size:
            raise RunError(
                f"the engines returned {len(samples)} samples for {len(prompts)} x {group_size}, of weights "
                f"{sorted(stale) or self._version} beside version {self._version}"
            )
        return samples

    def push(self, source: Source, version: int) -> PushStats:
        """See `RolloutEngine.push`; the seconds are those of the slowest engine."""
        self._unusable = f"push {version} did not reach every engine; generate again after one that does"
        outcome = _attempt(lambda: self._pusher.push(source, version))
        outcomes = self._exchange(outcome)
        _raise_first(outcomes, outcome)
        self._version, self._unusable = version, None
        stats = [outcomes[owner].value for owner in self._placement.owners]
        return replace(stats[0], seconds=max(part.seconds for part in stats))

    def sleep(self, level: int = 1) -> None:
        """Free GPU memory (1: weights kept in host memory, 2: dropped, a push must follow); does nothing on a CPU."""
        self._on_owners(lambda engine, _: engine.sleep(level))

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory back: tags ("weights",) before a push, ("kv_cache",) before sampling, None for all."""
        self._on_owners(lambda engine, _: engine.wake(tags))

    def close(self) -> None:
        """End this rank's engine. Not collective: ranks may close at any time, also after an error."""
        if self._engine is not None:
            self._engine.close()

    def _launch(self, index: int, parallel: Parallel) -> VllmEngine:
        spec = engine_spec(self._config, parallel, index, self._placement)
        log = self._config.run_dir / "logs" / f"engine-{index}.log"
        return VllmEngine(spec, owner=f"rank {parallel.rank}", log=log, deadlines=self._deadlines)

    def _on_owners(self, call: Callable[[VllmEngine, int], Value]) -> list[Value]:
        """Run something on each engine's owner; every rank gets all results, in the order of the engines."""

        def here() -> Value | None:
            return None if self._engine is None or self._index is None else call(self._engine, self._index)

        outcome = _attempt(here)
        outcomes = self._exchange(outcome)
        _raise_first(outcomes, outcome)
        return [outcomes[owner].value for owner in self._placement.owners]

    def _exchange(self, outcome: Outcome[Any]) -> list[Outcome[Any]]:
        """Every rank's outcome, by rank."""
        if not dist.is_initialized():
            return [outcome]
        message = replace(outcome, exception=None)
        outcomes = [message] * dist.get_world_size()
        dist.all_gather_object(outcomes, message, group=self._group)
        return outcomes


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """How a call ended on one rank: with a value, or with an error's text.

    Example: Outcome(value=None, error="engine 0 (process 4711) was ended by SIGKILL while rank 0 waited for ...")
    """

    value: Any = None
    error: str | None = None
    exception: BaseException | None = None  # on the rank itself; it does not travel


def _attempt(call: Callable[[], Value]) -> Outcome[Value]:
    try:
        return Outcome(value=call())
    except RunError as error:
        return Outcome(error=str(error), exception=error)
    except Exception as error:  # noqa: BLE001  a bug here must not leave the other ranks waiting; it is raised again
        return Outcome(error=f"{type(error).__name__}: {error}", exception=error)


def _raise_first(outcomes: Sequence[Outcome[Any]], own: Outcome[Any]) -> None:
    """End all ranks alike if one failed.

    Raises:
        RunError: the first failure, in the order of ranks; a rank's own failure keeps its type and traceback.
    """
    if own.exception is not None:
        raise own.exception
    for outcome in outcomes:
        if outcome.error is not None:
            raise RunError(outcome.error)


def _deadlines(config: Config) -> Deadlines:
    rollout = config.rollout
    return Deadlines(rollout.start_timeout_s, rollout.generate_timeout_s, rollout.push_timeout_s)


def _exchange_group(deadlines: Deadlines) -> dist.ProcessGroup | None:
    """A gloo group of its own: it outwaits the engines, and takes CPU objects where the trainer talks over NCCL."""
    if not dist.is_initialized():
        return None
    longest = max(deadlines.start, deadlines.generate, deadlines.push)
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=longest + EXCHANGE_SLACK_S))
