"""The sampling half of a run: prompts, responses, rewards, logs.

A run with `rollout.only` has only this half. A run that trains (run.py) adds the model, its gradient and its updates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from oblr_megatron.checkpoint.resume import Checkpoint, changes, choose
from oblr_megatron.checks.layout import check_port
from oblr_megatron.checks.run_dir import check_run_dir
from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest
from oblr_megatron.evaluation.accuracy import metrics as accuracies
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.items import RunItems
from oblr_megatron.memory.pass_plan import Layout, idle_replicas
from oblr_megatron.memory.select_mode import ModeChoice, with_mode
from oblr_megatron.metrics import METRICS_FILE, MetricsWriter, Record, read_metrics
from oblr_megatron.model import parallel as layout
from oblr_megatron.observe import step_metrics
from oblr_megatron.observe.alarms import LiveAlarms, floor_of
from oblr_megatron.observe.console import Display, open_display
from oblr_megatron.observe.performance.profiler import Profiler, open_profiler
from oblr_megatron.observe.performance.ranks import RankLog
from oblr_megatron.observe.performance.utilization import Utilization
from oblr_megatron.observe.status import recorded
from oblr_megatron.observe.step_metrics import StepRecord
from oblr_megatron.preflight import Inputs, preflight, write_config
from oblr_megatron.rewards.base import Reward
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.rewards.shared import FailedSteps, SharedReward
from oblr_megatron.rollout import open_engines
from oblr_megatron.rollout.dynamic_sampling import Batch, call_seed, refill
from oblr_megatron.rollout.replay import ReplayEngine
from oblr_megatron.rollout.staleness import staleness
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.runtime.collectives import Collectives, attempt, raise_first
from oblr_megatron.runtime.run_lock import run_lock
from oblr_megatron.runtime.stopping import StopRequest
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Scored

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import Prompt, Sample


class PromptSource(Protocol):
    """The source of a step's prompts: the data, or saved steps."""

    @property
    def epoch(self) -> int:
        """Completed passes over the data."""
        ...

    @property
    def num_skipped(self) -> int:
        """Rows of the data that were skipped."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the source, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position; UserError when the state belongs to other data."""
        ...


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The open parts of a run that samples, the same on every rank; made by `open_sampling`."""

    config: Config
    parallel: Parallel
    model: HFDir
    engines: RolloutEngine
    reward: Reward
    stream: PromptSource
    held_out: dict[str, list[Prompt]]
    evaluations: RunItems
    metrics: MetricsWriter
    display: Display
    alarms: LiveAlarms | None  # of the first rank
    timer: PhaseTimer
    utilization: Utilization
    ranks: RankLog
    failed_steps: FailedSteps
    stop: StopRequest
    collectives: Collectives
    control_group: ProcessGroup  # of all ranks, on the CPU
    resumed: Checkpoint | None  # the checkpoint that the run continues from
    version: int = 0  # of the trainer's weights: updates so far
    longest_step_s: float = 0.0
    done: int = 0  # the last step in metrics.jsonl
    stopped_by: str | None = None  # why the run ends before its last step

    @property
    def start(self) -> int:
        """Steps that were done when this process started."""
        return 0 if self.resumed is None else self.resumed.step

    def begin_step(self, step: int) -> StepRecord:
        """Start the clock of a step, counted from 0; its record."""
        self.stop.stepping = True
        self.timer.begin_step(step)
        return StepRecord(done=step + 1)

    def rollout(self, prompts: list[Prompt], record: StepRecord, batch: int = 0) -> list[Sample]:
        """G samples for every prompt in prompt-major order, the same on every rank.

        Args:
            prompts: Q of them, or fewer in a further `batch` of dynamic sampling.
            record: of the step.
            batch: of the step; every batch has its own seeds.

        Raises:
            StaleSampleError: a sample's weights are more than rollout.max_staleness updates old.
        """
        config = self.config
        with self.timer("rollout"):
            request = SamplingRequest.for_training(config, call_seed(config.seed, record.done - 1, batch))
            samples = self.engines.generate(prompts, request)
        age = staleness((sample.version for sample in samples), self.version, config.rollout.max_staleness)
        record.metrics["rollout/staleness_max"] = max(age, record.metrics.get("rollout/staleness_max", 0))
        return samples

    def score(self, prompts: list[Prompt], samples: list[Sample], record: StepRecord) -> Scored:
        """Rewards [Q, G] of samples in prompt-major order, the same on every rank."""
        group = self.config.group_size
        with self.timer("reward"):
            result = self.reward.score(prompts, samples)
        record.rewards.append(result)
        return Scored(
            rewards=torch.tensor(result.rewards, dtype=torch.float64).view(-1, group),
            lengths=torch.tensor([len(sample.response_ids) for sample in samples]).view(-1, group),
            failures=result.failures + result.timeouts,
        )

    def refill(self, batch: Batch, record: StepRecord) -> Batch:
        """The batch that the step trains on, which the record then holds.

        With rollout.dynamic_sampling, further groups replace those with equal rewards, and the metrics of rewards cover
        all groups that were sampled. A replay takes saved steps as they are.

        Raises:
            RunError: the reward has failed for every response of reward.max_failed_steps steps.
        """
        rollout = self.config.rollout
        if rollout.dynamic_sampling and rollout.replay is None:

            def draw(count: int, number: int) -> Batch:
                further = self.stream.take(count)
                responses = self.rollout(further, record, number)
                return Batch(further, responses, self.score(further, responses, record))

            seed = call_seed(self.config.seed, record.done - 1)
            refilled = refill(batch, draw, max_batches=rollout.dynamic_sampling_max_batches, seed=seed)
            record.metrics |= refilled.metrics() | step_metrics.of_rewards(refilled.rewards)
            batch = refilled.step
        record.prompts, record.samples, record.scored = batch.prompts, batch.samples, batch.scored
        self.failed_steps.take(record.rewards)
        return batch

    def save(self, batch: Batch, record: StepRecord) -> None:
        """Write the step's samples and rewards to RUN_DIR/rollouts if the config asks for it; rank 0 writes."""
        rollout = self.config.rollout
        if self.parallel.rank == 0 and (rollout.save or rollout.only):
            saved = SavedStep(
                step=record.done,
                temperature=rollout.temperature,
                epoch=self.stream.epoch,
                skipped=self.stream.num_skipped,
                prompts=batch.prompts,
                samples=batch.samples,
                rewards=batch.scored.rewards.flatten().tolist(),
                model=self.model.fingerprint,
            )
            write_step(self.config.run_dir / "rollouts", saved)

    def release(self) -> None:
        """Put engines that share the trainer's GPUs to sleep (rollout.sleep_level); the next push wakes them."""
        with self.timer("rollout"):
            self.engines.sleep(self.config.rollout.sleep_level)

    def evaluate(self, record: StepRecord) -> None:
        """Held-out accuracy before the first step, after the last, and every `evaluate.every_steps`."""
        options, step = self.config.evaluate, record.done
        due = options.every_steps and (step % options.every_steps == 0 or step == self.config.num_steps)
        if not (due and self.held_out):
            return
        with self.timer("evaluate"):
            for name, prompts in self.held_out.items():
                sink = self.evaluations.sink(step, name)
                grades = evaluate(name, self.engines, prompts, self.reward, self.config, sink=sink)
                record.metrics |= {f"eval/{name}/{metric}": value for metric, value in accuracies(grades).items()}

    def log(self, record: StepRecord) -> None:
        """Complete the record of a step and write it to metrics.jsonl, tensorboard and the console."""
        timing = self.timer.finish_step()
        self.longest_step_s = max(self.longest_step_s, timing["timing_s/step"])
        samples, scored = record.samples, record.scored
        assert scored is not None, "a step has rewards"
        found = step_metrics.of_step(samples, scored, record.stats, timing) | step_metrics.of_scoring(record.rewards)
        found |= self.utilization.metrics(samples, scored, timing)
        found |= self.ranks.take(record.done, timing, self.timer.own)
        record.metrics = found | record.metrics | self.engines.metrics()
        record.metrics |= {"data/epoch": self.stream.epoch, "data/skipped": self.stream.num_skipped}
        self.write(record)
        for line in step_metrics.sample_lines(record, self.config.log.samples):
            self.display.message(line)

    def write(self, record: StepRecord) -> None:
        """Pass the metrics of a record to metrics.jsonl, console and alarms."""
        written = self.metrics.write(record.done, record.metrics)
        self.display.step(record.done, record.metrics)
        if self.alarms is not None:
            self.alarms.take(written, next((result.cause for result in record.rewards if result.error), ""))
        self.done = record.done

    def stopped(self, step: int) -> bool:
        """Whether the run ends after `step` steps, before its last one; if so, a message says why."""
        reason = self.stop.agreed(self.longest_step_s, self.control_group)
        if reason is None or step == self.config.num_steps:
            return False
        self.stopped_by = reason
        self.display.message(f"stopped after step {step} of {self.config.num_steps} ({reason}); continue with --resume")
        return True


@contextmanager
def open_sampling(config: Config) -> Iterator[Sampling]:
    """Check, start and finally close everything that sampling needs; cheap failures come first.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    rank, world_size = layout.rank_from_environment()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(config.checkpoint))
        own = attempt(lambda: _inputs(config, rank, world_size, stack))
        if world_size == 1:
            raise_first([own], own)
        layout.join(config.parallel)
        stack.callback(layout.shutdown)
        collectives = Collectives(rank)
        collectives.settle(own, what="their checks", seconds=config.parallel.distributed_timeout_s)
        inputs: Inputs = own.value
        parallel = layout.initialize(config.parallel, seed=config.seed)
        resumed = choose(inputs.checkpoints, parallel.rank, world_size)
        norms = _of_first_rank(inputs.norms)
        if norms is not None:
            config = with_mode(config, norms.mode)
        first = parallel.tp_rank == parallel.pp_rank == parallel.cp_rank == 0  # of the ranks of a replica
        share = parallel.dp_rank if first else None
        scoring = build_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        reward = stack.enter_context(SharedReward(scoring, share, parallel.dp_size))
        display = open_display(config.log, config.num_steps, rank=parallel.rank)
        engines = open_engines(config, parallel, display.waiting)
        stack.callback(engines.close)
        stack.enter_context(display)
        for line in _opening_lines(config, inputs.model.config, world_size, norms, resumed):
            display.message(line)
        metrics = stack.enter_context(
            MetricsWriter(
                config.run_dir,
                config.log,
                rank=parallel.rank,
                world_size=world_size,
                resume_step=_metrics_until(config, resumed),
            )
        )
        stream = _prompt_source(inputs, engines)
        past: list[Record] = []
        if resumed is not None:
            stream.load_state_dict(resumed.state["data"])
            past = _records_until(config.run_dir, resumed.step) if parallel.rank == 0 else []
            for record in past:
                display.recall(record)
        floor = floor_of(config.algo)
        profiler = stack.enter_context(open_profiler(config, parallel.rank, display.message))
        control_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=parallel.timeout_s))
        yield Sampling(
            config=config,
            parallel=parallel,
            model=inputs.model,
            engines=engines,
            reward=reward,
            stream=stream,
            held_out=inputs.held_out,
            evaluations=RunItems(config.run_dir / "evaluations" if config.evaluate.save and rank == 0 else None),
            metrics=metrics,
            display=display,
            alarms=LiveAlarms(config.run_dir, floor, display.message, past) if parallel.rank == 0 else None,
            timer=_timer(display.phase, profiler),
            utilization=Utilization.of(inputs.model.config, config, world_size),
            ranks=RankLog(config.run_dir, control_group, _metrics_until(config, resumed)),
            failed_steps=FailedSteps(config.reward),
            stop=stop,
            collectives=collectives,
            control_group=control_group,
            resumed=resumed,
        )


@contextmanager
def started(sampling: Sampling) -> Iterator[None]:
    """Record an open run in its directory, which stays as it was when opening was refused."""
    if sampling.parallel.rank == 0:
        write_config(sampling.config)
    with recorded(sampling):
        yield


def _inputs(config: Config, rank: int, world_size: int, stack: ExitStack) -> Inputs:
    """This rank's part of the checks; rank 0 also takes the lock of the run directory."""
    if rank != 0:
        return preflight(config, world_size, owns_run_dir=False)
    if world_size > 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        check_port(int(os.environ["MASTER_PORT"]))  # under torchrun the agent holds it already
    check_run_dir(config.run_dir, holds_run=config.checkpoint.resume != "none")
    stack.enter_context(run_lock(config.run_dir))
    return preflight(config, world_size)


def _records_until(run_dir: Path, step: int) -> list[Record]:
    """The records that a resumed run keeps; none in a new directory."""
    records = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    return [record for record in records if (record["step"] or 0) <= step]


def _metrics_until(config: Config, resumed: Checkpoint | None) -> int | None:
    """Step up to which metrics.jsonl is kept; None for a new file. A run that never saved starts over."""
    if resumed is not None:
        return resumed.step
    return None if config.checkpoint.resume == "none" else -1


def _prompt_source(inputs: Inputs, engines: RolloutEngine) -> PromptSource:
    if isinstance(engines, ReplayEngine):
        return engines
    assert inputs.stream is not None, "only a replay has no data stream"
    return inputs.stream


def _opening_lines(
    config: Config, hf_config: Mapping[str, Any], world_size: int, norms: ModeChoice | None, resumed: Checkpoint | None
) -> Iterator[str]:
    """Messages at the start of a run: what it continues from, its recipe, how norms are computed, its memory."""
    if resumed is not None:
        yield f"continues after step {resumed.step}, from {resumed.path}"
        yield from (f"changed: {change}" for change in changes(resumed, config))
    elif config.checkpoint.resume != "none":
        yield f"no checkpoint in {config.run_dir}: the run starts at step 0"
    algo = config.algo
    if algo.preset is not None:
        yield f"recipe {algo.preset}: {algo.baseline} baseline, {algo.aggregation} loss, {algo.schedule} rate"
    if norms is not None:
        yield f"norms by {norms.mode}: {norms.reason}"
        yield f"memory: {norms.estimate.table()}"
    idle = None if config.rollout.only else idle_replicas(config, Layout.of(hf_config, config, world_size))
    if idle is not None:
        yield idle
    if config.rollout.only:
        yield f"rollout.only: samples {config.num_steps} batches from {config.model.path}, trains and evaluates nothing"
    if config.rollout.replay is not None:
        yield f"replay: samples come from {config.rollout.replay}; nothing is sampled or evaluated"


def _of_first_rank(norms: ModeChoice | None) -> ModeChoice | None:
    """The mode that rank 0 selected, on every rank: ranks may see different amounts of free memory."""
    shared = [norms]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _timer(on_phase: Callable[[str | None], None], profiler: Profiler) -> PhaseTimer:
    """A timer of phases. On a CPU it also takes this thread's CPU time, which excludes waits for other ranks."""
    own = None if torch.cuda.is_available() else time.thread_time
    return PhaseTimer(on_phase, _synchronize, own_clock=own, observer=profiler)


def _synchronize() -> None:
    """Wait for the GPU at the end of a phase, so that its kernels are not counted in the next phase."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
