"""The sampling half of a run: prompts, responses, rewards, logs. `opening.open_sampling` makes it.

A run with `rollout.only` has only this half. A run that trains (run.py) adds the model, its gradient and its updates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.algo.baseline import mixed_groups
from oblr_megatron.checkpoint.resume import Checkpoint
from oblr_megatron.checks.run_dir import ROLLOUTS
from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest, call_seed
from oblr_megatron.evaluation.accuracy import metrics as accuracies
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.items import COLUMNS, RunItems
from oblr_megatron.memory.pass_plan import tokens_of_a_wave
from oblr_megatron.metrics import MetricsWriter
from oblr_megatron.observe import step_metrics
from oblr_megatron.observe.alarms import LiveAlarms
from oblr_megatron.observe.console import Display
from oblr_megatron.observe.performance.profiler import Profiler
from oblr_megatron.observe.performance.ranks import RankLog
from oblr_megatron.observe.performance.utilization import Utilization
from oblr_megatron.observe.prompt_log import PromptLog
from oblr_megatron.observe.step_metrics import StepRecord
from oblr_megatron.observe.trackers.feed import Trackers
from oblr_megatron.rewards.base import RewardResult, group_size
from oblr_megatron.rewards.shared import FailedSteps, SharedReward
from oblr_megatron.rollout.ahead import Ahead
from oblr_megatron.rollout.dynamic_sampling import MAX_BATCHES, Batch, assembled, refill
from oblr_megatron.rollout.routes import with_routes
from oblr_megatron.rollout.staleness import staleness
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.rollout.waves import Collected, Wave, whole_step
from oblr_megatron.runtime.collectives import Collectives
from oblr_megatron.runtime.stopping import StopRequest
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Scored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.data.prompts import PromptStream
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.rollout.replay import ReplayEngine
    from oblr_megatron.types import Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The open parts of a run that samples, the same on every rank; made by `open_sampling`."""

    config: Config
    parallel: Parallel
    model: HFDir
    engines: RolloutEngine
    reward: SharedReward
    stream: PromptStream | ReplayEngine
    held_out: dict[str, list[Prompt]]
    evaluations: RunItems
    metrics: MetricsWriter
    trackers: Trackers
    display: Display
    alarms: LiveAlarms | None  # on the first rank
    prompt_log: PromptLog | None  # on the first rank
    timer: PhaseTimer
    profiler: Profiler | None
    utilization: Utilization
    ranks: RankLog
    failed_steps: FailedSteps
    stop: StopRequest
    collectives: Collectives
    control_group: ProcessGroup  # all ranks, on the CPU
    resumed: Checkpoint | None  # the checkpoint that the run continues from
    streams: Callable[[Sequence[Prompt]], bool] = lambda _: False
    """Whether the gradient of a step may begin before all its prompts are finished; a run that trains sets it."""
    version: int = 0  # version of the trainer's weights: steps done
    longest_step_s: float = 0.0  # without its evaluation
    evaluation_s: float = 0.0  # the last evaluation, of an earlier process too
    done: int = 0  # the last step in metrics.jsonl
    stopped_by: str | None = None  # why the run ends before its last step
    ahead: Ahead | None = None  # the next step's samples, with rollout.overlap "one_step"

    @property
    def start(self) -> int:
        """Steps that were done when this process started."""
        return 0 if self.resumed is None else self.resumed.step

    def begin_step(self, step: int) -> StepRecord:
        """The record of a step, counted from 0."""
        self.stop.stepping = True
        if self.profiler is not None:
            self.profiler.begin_step(step)
        return StepRecord(done=step + 1)

    @property
    def position(self) -> dict[str, Any]:
        """Of the data, after the last step: a resumed run continues there."""
        return self.stream.state_dict() if self.ahead is None else self.ahead.position

    def prompts(self) -> list[Prompt]:
        """The Q prompts of a step, the same on every rank."""
        return self.stream.next_prompts(self.config.num_prompts) if self.ahead is None else self.ahead.prompts

    def rollout(self, prompts: list[Prompt], record: StepRecord, batch: int = 0) -> list[Sample]:
        """G samples for every prompt in prompt-major order, the same on every rank.

        Each further `batch` of a step with dynamic sampling has fewer prompts, and its own seeds.

        Raises:
            StaleSampleError: a sample's weights are more than rollout.max_staleness updates old.
        """
        config = self.config
        with self.timer("rollout"):
            if self.ahead is not None:
                samples, self.ahead = self.ahead.finish(), None
            else:
                request = SamplingRequest.for_training(config, call_seed(config.seed, record.done - 1, batch))
                samples = self.engines.generate(prompts, request)
        self._check_age(samples, record)
        return samples

    def sample_ahead(self, record: StepRecord) -> None:
        """With rollout.overlap "one_step", let the engines draw the samples of the step after this one."""
        if self.config.rollout.overlap == "one_step" and record.done < self.config.num_steps:
            with self.timer("rollout"):
                self.ahead = Ahead(self.engines, self.stream, self.config, record.done)

    def finish_ahead(self) -> None:
        """Wait for the next step's samples before the update: a restarted engine samples with the same weights."""
        if self.ahead is not None:
            with self.timer("rollout"):
                self.ahead.finish()

    def _check_age(self, samples: Sequence[Sample], record: StepRecord) -> None:
        age = staleness((sample.version for sample in samples), self.version, self.config.rollout.max_staleness)
        oldest = max(age, record.metrics.get("rollout/staleness_max", 0))
        record.metrics["rollout/staleness_max"] = oldest

    @property
    def refills(self) -> bool:
        """Whether groups of equal rewards are replaced."""
        return self.config.rollout.dynamic_sampling and self.config.rollout.replay is None

    def batches(self, record: StepRecord) -> Iterator[Wave]:
        """The Q prompts of a step with samples and rewards: all at once, or in the order in which they are finished.

        Engines on the trainer's GPUs free their memory before the last batch. With rollout.overlap "one_step" the next
        step's samples are complete at the end, before the weights change. Raises as `rollout`, `score` and `refill`.
        """
        prompts, trains = self.prompts(), not self.config.rollout.only
        for batch in self._streamed(prompts, record) if self.streams(prompts) else self._whole(prompts, record):
            if batch.last and trains:
                self.release()
            yield batch
        if trains:
            self.finish_ahead()

    def _whole(self, prompts: list[Prompt], record: StepRecord) -> Iterator[Wave]:
        """All prompts of a step as one batch."""
        samples = self.rollout(prompts, record)
        scored = self.score(prompts, samples, record)
        batch = self.refill(Batch(prompts, samples, scored), record)
        self.save(batch, record)
        self.sample_ahead(record)
        yield whole_step(batch)

    def _streamed(self, prompts: list[Prompt], record: StepRecord) -> Iterator[Wave]:
        """Waves of prompts as the engines finish them, scored; the last one when all prompts of the step have come.

        With rollout.dynamic_sampling, groups of equal rewards wait for the last wave, because others may replace them.
        """
        config, collected, used = self.config, Collected(), set[int]()
        tokens = tokens_of_a_wave(config, self.parallel.dp_size)
        request = SamplingRequest.for_training(config, call_seed(config.seed, record.done - 1))
        with self.timer("rollout"):
            flight = self.engines.begin(prompts, request, self.reward.own)
        waves = 1  # with the last one
        while len(collected) < len(prompts):
            with self.timer("rollout"):
                groups = flight.next_groups(tokens)
            positions, samples = list(groups), [sample for group in groups.values() for sample in group]
            self._check_age(samples, record)
            taken = [prompts[position] for position in positions]
            known = [flight.rewards[position] for position in positions] if flight.rewards else []
            part = Batch(taken, samples, self.score(taken, samples, record, known))
            collected.add(positions, part)
            certain = mixed_groups(part.scored.rewards).tolist() if self.refills else [True] * len(positions)
            now = [position for position, kept in zip(positions, certain, strict=True) if kept]
            if now and len(collected) < len(prompts):
                used.update(now)
                waves += 1
                yield Wave(now, collected.part(now), last=False)
        batch = self.refill(collected.whole(), record)
        self.save(batch, record)
        record.metrics["rollout/waves"] = waves
        rest = [position for position in range(len(batch.prompts)) if position not in used]
        yield Wave(rest, assembled({position: (batch, position) for position in rest}, failures=0), last=True)

    def score(
        self, prompts: list[Prompt], samples: list[Sample], record: StepRecord, known: Sequence[RewardResult] = ()
    ) -> Scored:
        """Rewards [Q, G] of Q * G samples in prompt-major order, the same on every rank.

        `known` are the results of each prompt, if the engines' ranks have scored them. Else all replicas score now.
        """
        group = group_size(prompts, samples)
        with self.timer("reward"):
            result = self.reward.whole(known) if known else self.reward.score(prompts, samples)
        record.rewards.append(result)
        unscored = result.unscored
        values = [math.nan if n in unscored else reward for n, reward in enumerate(result.main_rewards)]
        record.visits.append((prompts, torch.tensor(values, dtype=torch.float64).view(-1, group)))
        return Scored(
            rewards=torch.tensor(result.rewards, dtype=torch.float64).view(-1, group),
            lengths=torch.tensor([sample.length for sample in samples]).view(-1, group),
            failures=result.failures + result.timeouts,
        )

    def refill(self, batch: Batch, record: StepRecord) -> Batch:
        """The batch that the step trains on, which the record then holds.

        With rollout.dynamic_sampling, further groups replace those with equal rewards, and the metrics of rewards cover
        all groups that were sampled. A replay takes saved steps as they are.

        Raises:
            RunError: the reward has failed for every response of reward.max_failed_steps steps.
        """
        if self.refills:

            def draw(count: int, number: int) -> Batch:
                further = self.stream.next_prompts(count)
                responses = self.rollout(further, record, number)
                return Batch(further, responses, self.score(further, responses, record))

            seed = call_seed(self.config.seed, record.done - 1)
            refilled = refill(batch, draw, max_batches=MAX_BATCHES, seed=seed)
            record.metrics |= refilled.metrics() | step_metrics.of_rewards(refilled.rewards)
            batch = refilled.step
        record.prompts, record.samples, record.scored = batch.prompts, batch.samples, batch.scored
        record.unrewarded = self.failed_steps.count(record.rewards)
        if record.unrewarded:
            self.display.message("warning: the reward failed for every response of the step, which changes no weights")
        return batch

    def save(self, batch: Batch, record: StepRecord) -> None:
        """Write the step's samples and rewards to RUN_DIR/rollouts if the config asks for it; rank 0 writes.

        Raises:
            UnwrittenError: on all ranks, if rank 0 cannot write them.
            DeadlineError: rank 0 took longer than parallel.distributed_timeout_s.
        """
        rollout = self.config.rollout
        if not (rollout.save or rollout.only):
            return
        writes = self.parallel.rank == 0
        samples = self.with_routes(batch.samples, range(len(batch.samples)) if writes else ())

        saved = SavedStep(
            step=record.done,
            temperature=rollout.temperature,
            epoch=self.stream.epoch,
            skipped=self.stream.num_skipped,
            prompts=batch.prompts,
            samples=samples,
            rewards=batch.scored.rewards.flatten().tolist(),
            model=self.model.fingerprint,
            position=self.position,
            filters=rollout.filters,
        )
        self.collectives.together(
            lambda: write_step(self.config.run_dir / ROLLOUTS, saved) if writes else None,
            what="the samples to be written",
            seconds=self.config.parallel.distributed_timeout_s,
        )

    def with_routes(self, samples: list[Sample], wanted: Iterable[int]) -> list[Sample]:
        """With model.moe_routing_replay, the samples with the routes of the wanted ones; see `rollout.routes`."""
        if not self.config.model.moe_routing_replay:
            return samples
        with self.timer("rollout"):
            return with_routes(samples, wanted, self.collectives, seconds=self.config.parallel.distributed_timeout_s)

    def release(self) -> None:
        """Put engines that share the trainer's GPUs to sleep (rollout.sleep_level); the next push wakes them."""
        with self.timer("rollout"):
            self.engines.sleep(self.config.rollout.sleep_level)

    def evaluation_due(self, step: int) -> bool:
        """Whether the weights after a step are to be evaluated."""
        every = self.config.evaluate.every_steps
        return bool(self.held_out and every) and (step % every == 0 or step == self.config.num_steps)

    def evaluate(self, record: StepRecord) -> None:
        """Held-out accuracy before the first step, after the last, and every `evaluate.every_steps`.

        A reward that fails for all responses does not end the run: the metrics that need its scores are left out.
        """
        step = record.done
        if not self.evaluation_due(step):
            return
        with self.timer("evaluate"):
            for name, prompts in self.held_out.items():
                sink = self.evaluations.sink(step, name)
                grades = evaluate(name, self.engines, prompts, self.reward, self.config, sink=sink)
                record.metrics |= {f"eval/{name}/{metric}": value for metric, value in accuracies(grades).items()}
                record.unscored |= bool(grades.lost)
                if grades.lost and self.parallel.rank == 0:
                    what = f"no {' or '.join(grades.lost)} response of set {name!r} could be scored"
                    logger.warning("%s at step %d, its accuracies are left out: %s", what, step, grades.fault)
                self.trackers.table(step, name, COLUMNS, self.evaluations.rows)
        record.evaluated = True

    def log(self, record: StepRecord) -> None:
        """Complete the record of a step and write it to metrics.jsonl, trackers and console."""
        timing = self.timer.finish_step()
        if self.profiler is not None:
            self.profiler.end_step()
        self.evaluation_s = timing.get("timing_s/evaluate", self.evaluation_s)
        self.longest_step_s = max(self.longest_step_s, timing["timing_s/step"] - timing.get("timing_s/evaluate", 0.0))
        samples, scored = record.samples, record.scored
        assert scored is not None, "a step has rewards"
        metrics = step_metrics.of_step(samples, scored, record.stats, timing) | step_metrics.of_scoring(record.rewards)
        if self.config.rollout.environment.function:
            metrics |= step_metrics.of_episodes(samples)
        metrics |= self.utilization.metrics(samples, scored, timing)
        metrics |= self.ranks.gather(record.done, timing, self.timer.own)
        record.metrics = metrics | record.metrics | self.engines.metrics()
        epoch = self.stream.epoch if self.ahead is None else self.ahead.epoch  # of this step, not of the next
        record.metrics |= {"data/epoch": epoch, "data/skipped": self.stream.num_skipped}
        self.write(record)
        if self.prompt_log is not None:
            self.prompt_log.write(record.done, record.visits)
        for line in step_metrics.sample_lines(record, self.config.log.samples):
            self.display.message(line)

    def write(self, record: StepRecord) -> None:
        """Pass the metrics of a record to metrics.jsonl, trackers, console and alarms."""
        written = self.metrics.write(record.done, record.metrics)
        self.trackers.log(written)
        self.display.step(record.done, record.metrics)
        if self.alarms is not None:
            cause = next((result.cause for result in record.rewards if result.error), "")
            for alarm in self.alarms.check(written, cause):
                self.trackers.alarm(alarm)
        self.done = record.done

    def stopped(self, step: int) -> bool:
        """Whether the run ends after `step` steps, before its last one; if so, a message says why.

        Before this process has done a step, signals alone count: the time limit's margin is for one step and its save.
        """
        next_s = self.longest_step_s + (self.evaluation_s if self.evaluation_due(step + 1) else 0.0)
        if step == self.start:
            next_s = -math.inf
        reason = self.stop.shared_reason(next_s, self.control_group)
        if reason is None or step == self.config.num_steps:
            return False
        self.stopped_by, self.trackers.state = reason, "stopped"
        self.display.message(f"stopped after step {step} of {self.config.num_steps} ({reason}); continue with --resume")
        return True
