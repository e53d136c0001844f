"""Saves a run's checkpoints in the background.

    saver = Saver(config, parallel, model)
    if saver.due(step, num_steps, values):
        saver.wait()                                                          # for the previous save
        saver.save(step, training_state(policy, optimizer), facts, values)    # returns once the state is copied
    saver.report()      # at a later step: outcome of the save

A checkpoint directory holds:

    common.pt, .metadata, metadata.json, __R_F.distcp       tensors in megatron-core's format (distributed.py)
    checkpoint.json                                         the manifest, with the trainer's facts (store.py)
    hf/                                                     config and tokenizer of the Hugging Face directory

A failed save is reported and leaves older checkpoints untouched.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oblr_megatron.checkpoint import partials, store
from oblr_megatron.checkpoint.distributed import State, TorchDistWriter
from oblr_megatron.checkpoint.hf_dir import HFDir
from oblr_megatron.checkpoint.hf_write import write_description
from oblr_megatron.checkpoint.store import FileEntry, Manifest
from oblr_megatron.checks.run_dir import ADAPTERS, CHECKPOINTS, EXPORTS
from oblr_megatron.config import Config
from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.formatting import duration, size
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.runtime.collectives import timed_out
from oblr_megatron.runtime.threads import in_thread

Facts = dict[str, Any]
"""Everything a resumed run needs besides tensors, as plain JSON."""

HF = "hf"  # subdirectory of a checkpoint
LAST_WHILE_S = 60.0  # time for a save in progress when the run fails
FAILURES = (RunError, OSError)  # a save's failures: told to every rank, which would wait for this one otherwise

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint with the largest `checkpoint.best_metric`. Example: Best(step=40, value=0.81)"""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Outcome of a save, equal on every rank.

    Example: Saved(step=40, num_bytes=12_345_678, seconds=0.21, failure=None)
    """

    step: int
    num_bytes: int
    seconds: float  # from the copy to the rename
    failure: str | None  # one line

    def __str__(self) -> str:
        if self.failure is not None:
            return f"the checkpoint of step {self.step} was not saved: {self.failure}"
        return f"checkpoint of step {self.step}: {size(self.num_bytes)} in {duration(self.seconds)}"


class Saver:
    """Saves checkpoints of one run, one at a time. All calls except `report` and `close` are collective.

    Args:
        config: `checkpoint`, `run_dir`, and what best_metric depends on, are read.
        parallel: layout of the ranks that save.
        model: directory the run started from, for config and tokenizer.
        resumed: state of the resumed checkpoint.

    A killed save left a partial directory, maybe on another machine. The first rank removes all of them.

    Raises:
        DeadlineError: in every call but `close`, if a save takes longer than parallel.distributed_timeout_s.
    """

    def __init__(self, config: Config, parallel: Parallel, model: HFDir, resumed: Facts | None = None) -> None:
        self._options, self._model, self._rank = config.checkpoint, model, parallel.rank
        self._directory, self._seconds = config.run_dir / CHECKPOINTS, config.parallel.distributed_timeout_s
        self._measure = _measure(config.model_dump(mode="json"))
        self._num_bytes = store.checkpoint_bytes(model, config)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._seconds))
        self._writer = TorchDistWriter(self._group, parallel)
        self._pending: Future[Saved] | None = None
        self._deadline = math.inf  # for the pending save, by time.monotonic
        self._reported = True
        self.best = self._best_before = self._carried(resumed)
        self.newest: int | None = None  # step of the last checkpoint that this process saved
        if self._rank == 0:  # it holds the lock of the run directory, so that nobody else writes here
            partials.remove_all(self._directory)
            for name in (*EXPORTS, *ADAPTERS.values()):
                export = (config.run_dir / name).resolve()
                partials.remove_all(export.parent, only=export.name)
        self._damaged = self._skipped(resumed)  # after `remove_all`, which may give a checkpoint its name back

    def due(self, step: int, num_steps: int, values: Mapping[str, float]) -> bool:
        """Whether to save after `step` of `num_steps` steps: by schedule, or because `values` are a new best.

        `values` are the step's metrics, an evaluation's included. Waits for a save in progress if its outcome decides.
        """
        every = self._options.every_steps
        scheduled = every > 0 and (step % every == 0 or step == num_steps)
        return scheduled or self._is_best(values)

    def save(
        self, step: int, state: State, facts: Facts, values: Mapping[str, float], *, background: bool = True
    ) -> None:
        """Save the state after `step` steps; call `wait` first.

        Args:
            step: steps done.
            state: see `distributed.training_state`; may change after this returns.
            facts: see `Facts`.
            values: the step's metrics, to find the best checkpoint.
            background: return before the state is written, if `checkpoint.async_save` is set.
        """
        assert self._pending is None, "call wait() before the next save"
        self._best_before = self.best
        if self._is_best(values):
            self.best = Best(step, values[self._options.best_metric])
        facts = facts | {"best": None if self.best is None else [self.best.step, self.best.value]}
        keep = [] if self.best is None else [self._directory / store.step_name(self.best.step)]
        target, manifest = self._directory / store.step_name(step), Manifest(step, {}, facts)
        job = _Job(self._group, target, manifest, self._model, keep, self._damaged, self._rank)
        self._reported = False
        self._deadline = time.monotonic() + self._seconds
        background = background and self._options.async_save
        with self._within_deadline():
            begun = job.begin(self._num_bytes)
            write = self._writer.stage(state, job.partial, copy=background) if begun else None
        if write is not None:
            self._pending = in_thread(lambda: job.finish(write, self._options.keep_last), f"checkpoint-{step}")
        else:
            self._pending = Future()
            self._pending.set_result(job.saved())
        if not background:
            self._result()

    def report(self) -> Saved | None:
        """Outcome of the last save, returned once after it ended; ranks may get it at different steps."""
        if self._pending is None or self._reported or not (self._pending.done() or self._left() == 0):
            return None
        self._reported = True
        return self._result()

    def wait(self) -> Saved | None:
        """Wait until the save in progress has ended; return its outcome unless it was reported."""
        if self._pending is None:
            return None
        saved = self._settle()
        self._pending = None
        fresh, self._reported = not self._reported, True
        return saved if fresh else None

    def close(self) -> None:
        """When the run fails, wait at most LAST_WHILE_S for the save in progress. Not collective."""
        if self._pending is not None:
            futures.wait([self._pending], min(LAST_WHILE_S, self._left()))

    def path_of_best(self) -> Path | None:
        """The best checkpoint, if there is one."""
        return None if self.best is None else self._directory / store.step_name(self.best.step)

    def evaluated(self, checkpoint: Path, step: int, values: Mapping[str, float]) -> None:
        """Note the evaluation of the resumed checkpoint, which its process could not finish."""
        if checkpoint.parent == self._directory and self._is_best(values):
            self.best = self._best_before = Best(step, values[self._options.best_metric])

    def _carried(self, resumed: Facts | None) -> Best | None:
        """The best so far, if it has the same metric and lies in this run directory, as the first rank sees it.

        The metric is another one if evaluation or reward have changed, whatever its name.
        """
        best = None
        if self._rank == 0 and resumed is not None and resumed["best"]:
            earlier = Best(*resumed["best"])
            same = _measure(resumed["config"]) == self._measure
            if same and (self._directory / store.step_name(earlier.step)).is_dir():
                best = earlier
        shared = [best]
        dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]

    def _skipped(self, resumed: Facts | None) -> set[Path]:
        """The checkpoints that the run did not resume from, because they are damaged; for the first rank."""
        if self._rank != 0 or resumed is None:
            return set()
        used = self._directory / store.step_name(resumed["step"])
        return set(takewhile(lambda path: path != used, store.checkpoints_of(self._directory.parent)))

    def _is_best(self, values: Mapping[str, float]) -> bool:
        value = values.get(self._options.best_metric, math.nan)

        def beats(best: Best | None) -> bool:
            return math.isfinite(value) and (best is None or value > best.value)

        if self._pending is not None and beats(self._best_before) and not beats(self.best):
            self._settle()  # the best may be one that was not saved; every rank waits here, unlike in `report`
        return beats(self.best)

    def _settle(self) -> Saved:
        """Wait for the save in progress; if it failed, the best is the one before it."""
        saved = self._result()
        if saved.failure is not None:
            self.best = self._best_before
        else:
            self.newest = saved.step
        return saved

    def _result(self) -> Saved:
        assert self._pending is not None, "a save is in progress"
        with self._within_deadline():
            return self._pending.result(self._left())

    def _left(self) -> float:
        """Seconds until the deadline of the save in progress."""
        return max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def _within_deadline(self) -> Iterator[None]:
        """Turn a wait that took too long, for this rank's thread or for another rank, into a DeadlineError."""
        try:
            yield
        except (NotDoneError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and (isinstance(error, RunError) or not timed_out(error)):
                raise
            others = "the other ranks and " * (dist.get_world_size() > 1)
            what = f"{others}its checkpoint in {self._directory} (parallel.distributed_timeout_s)"
            raise DeadlineError(f"rank {self._rank}", what, self._seconds) from error


@dataclass
class _Job:
    """One save, from an empty directory to a committed one; every rank makes the same calls."""

    group: dist.ProcessGroup
    target: Path
    manifest: Manifest
    model: HFDir
    keep: list[Path]
    damaged: set[Path]
    rank: int
    partial: Path = Path()
    num_bytes: int = 0
    failure: str | None = None
    started: float = field(default_factory=time.monotonic)

    def begin(self, num_bytes: int) -> bool:
        """Create the directory if there is room for `num_bytes`; return whether it exists on every rank."""

        def make() -> Path:
            store.check_space(self.target.parent, num_bytes)
            return store.begin(self.target)

        made = self._on_first_rank(make)
        if made is not None:
            self.partial = made
            seen: list[bool] = [False] * dist.get_world_size()
            dist.all_gather_object(seen, os.path.isdir(self.partial), group=self.group)  # raises on no rank
            if not all(seen):
                self._fail(f"rank {seen.index(False)} cannot see {self.partial}; put run_dir on a shared file system")
                self._remove_partial()
        return self.failure is None

    def finish(self, write: Callable[[], None], keep_last: int) -> Saved:
        """Write, checksum and commit, then remove older checkpoints."""
        try:
            write()
        except RunError as error:  # on every rank
            self._fail(str(error))
        else:
            files = self._measured()
            if self.failure is None:
                self._on_first_rank(lambda: self._commit(files, keep_last))
        if self.failure is not None:
            self._remove_partial()
        return self.saved()

    def saved(self) -> Saved:
        """Outcome so far."""
        return Saved(self.manifest.step, self.num_bytes, time.monotonic() - self.started, self.failure)

    def _measured(self) -> dict[str, FileEntry]:
        """Sizes and checksums of all ranks' files; each rank reads back its own."""
        entries: dict[str, FileEntry] | str
        try:
            entries = store.measure(self.partial, (file.name for file in self.partial.glob(f"__{self.rank}_*")))
        except FAILURES as error:
            entries = str(error)
        gathered: list[dict[str, FileEntry] | str] = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, entries, group=self.group)
        files: dict[str, FileEntry] = {}
        for outcome in gathered:
            if isinstance(outcome, str):
                self._fail(outcome)
            else:
                files |= outcome
        return files

    def _commit(self, files: dict[str, FileEntry], keep_last: int) -> None:
        """Rank 0's part: write config, tokenizer and manifest, rename, and remove older checkpoints."""
        with store.writing(self.partial):
            write_description(self.model.config, self.model.copied, self.partial / HF)
        names = [str(path.relative_to(self.partial)) for path in self.partial.rglob("*") if path.is_file()]
        files |= store.measure(self.partial, (name for name in names if name not in files))
        self.num_bytes = sum(entry.num_bytes for entry in files.values())
        store.commit(self.partial, self.target, Manifest(self.manifest.step, files, self.manifest.state))
        self.damaged.discard(self.target)
        try:
            store.prune(self.target, keep_last, self.keep, self.damaged)
        except FAILURES as error:  # this checkpoint is saved; only a removal failed
            logger.warning("cannot remove an older checkpoint: %s", error)

    def _on_first_rank(self, action: Callable[[], Path | None]) -> Path | None:
        """Run `action` on rank 0; every rank gets its result, or None and the failure."""
        outcome: list[Any] = [None, None, 0]
        if self.rank == 0:
            try:
                outcome = [action(), None, self.num_bytes]
            except FAILURES as error:
                outcome = [None, str(error), 0]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, failure, self.num_bytes = outcome
        if failure is not None:
            self._fail(failure)
        return result

    def _remove_partial(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


def _measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that give checkpoint.best_metric its meaning, from a configuration as JSON."""
    evaluate = {key: value for key, value in config["evaluate"].items() if key != "every_steps"}
    metric = config["checkpoint"]["best_metric"]
    return {"metric": metric, "evaluate": evaluate, "reward": config["reward"]["name"]}
