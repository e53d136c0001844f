"""The half of a run that samples: prompts, responses, rewards, and what is written down about them.

A run with `rollout.only` is nothing but this; one that trains (run.py) adds the model, its gradient and its updates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from oblr_megatron.checkpoint.resume import Checkpoint, changes, choose
from oblr_megatron.checks.layout import check_port
from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest
from oblr_megatron.evaluation.accuracy import metrics as accuracies
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.items import RunItems
from oblr_megatron.memory.pass_plan import Layout, idle_replicas
from oblr_megatron.memory.select_mode import ModeChoice, with_mode
from oblr_megatron.metrics import MetricsWriter, Record, read_metrics
from oblr_megatron.model import parallel as layout
from oblr_megatron.observe import step_metrics
from oblr_megatron.observe.alarms import LiveAlarms, floor_of
from oblr_megatron.observe.console import Display, open_display
from oblr_megatron.observe.performance.profiler import Profiler, open_profiler
from oblr_megatron.observe.performance.ranks import RankLog
from oblr_megatron.observe.performance.utilization import Utilization
from oblr_megatron.preflight import Inputs, preflight, write_config
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.rewards.shared import SharedReward
from oblr_megatron.rollout.dynamic_sampling import Batch, call_seed, refill
from oblr_megatron.rollout.open import open_engines
from oblr_megatron.rollout.replay import ReplayEngine
from oblr_megatron.rollout.staleness import staleness
from oblr_megatron.rollout.step_file import SavedStep, write_step
from oblr_megatron.runtime.stopping import StopRequest
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Scored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import GradientStats, Prompt, Sample


class PromptSource(Protocol):
    """Where a step's prompts come from: the data, or saved steps."""

    @property
    def epoch(self) -> int:
        """Passes over the data that were completed."""
        ...

    @property
    def num_skipped(self) -> int:
        """Rows of the data that were left out."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands; plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the prompt that would have come next; UserError when the state is of other data."""
        ...


@dataclass(slots=True, kw_only=True)
class Sampling:
    """What `rollout.only` works with; made by `open_sampling`, identical on every rank."""

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
    stop: StopRequest
    control_group: ProcessGroup  # of all ranks, on the CPU
    resumed: Checkpoint | None  # what the run goes on from
    version: int = 0  # of the trainer's weights: updates so far
    record: dict[str, float] = field(default_factory=dict)  # figures of the step in progress
    results: list[RewardResult] = field(default_factory=list)  # of its judging, batch by batch
    logged: dict[str, float] = field(default_factory=dict)  # those of the step logged last
    longest_step_s: float = 0.0
    done: int = 0  # the step written last
    stopped_by: str | None = None  # why the run ends before its last step

    @property
    def start(self) -> int:
        """Steps that were done when this process began."""
        return 0 if self.resumed is None else self.resumed.step

    def rollout(self, prompts: list[Prompt], step: int, batch: int = 0) -> list[Sample]:
        """G samples a prompt in prompt-major order, the same on every rank.

        Args:
            prompts: Q of them, or fewer in a further `batch` of dynamic sampling.
            step: counted from 0.
            batch: of the step; each draws from seeds of its own.

        Raises:
            StaleSampleError: a sample was made by weights further behind than rollout.max_staleness.
        """
        config = self.config
        if batch == 0:
            self.timer.begin_step(step)
        with self.timer("rollout"):
            request = SamplingRequest.for_training(config, call_seed(config.seed, step, batch))
            samples = self.engines.generate(prompts, request)
        age = staleness((sample.version for sample in samples), self.version, config.rollout.max_staleness)
        self.record["rollout/staleness_max"] = max(age, self.record.get("rollout/staleness_max", 0))
        return samples

    def score_batch(self, prompts: list[Prompt], samples: list[Sample]) -> Scored:
        """Rewards [Q, G] of a step's samples, on every rank."""
        group = self.config.group_size
        with self.timer("reward"):
            result = self.reward.score(prompts, samples)
        self.results.append(result)
        return Scored(
            rewards=torch.tensor(result.rewards, dtype=torch.float64).view(-1, group),
            lengths=torch.tensor([len(sample.response_ids) for sample in samples]).view(-1, group),
            failures=result.failures + result.timeouts,
        )

    def refill(
        self, prompts: list[Prompt], samples: list[Sample], scored: Scored, step: int
    ) -> tuple[list[Prompt], list[Sample], Scored]:
        """With rollout.dynamic_sampling, further groups in the place of those whose rewards are all equal.

        Rewards are reported of everything that was sampled, not of what is left. Saved steps are taken as they were
        saved.
        """
        rollout = self.config.rollout
        if not rollout.dynamic_sampling or rollout.replay is not None:
            return prompts, samples, scored

        def draw(count: int, batch: int) -> Batch:
            further = self.stream.take(count)
            responses = self.rollout(further, step, batch)
            return Batch(further, responses, self.score_batch(further, responses))

        refilled = refill(
            Batch(prompts, samples, scored),
            draw,
            max_batches=rollout.dynamic_sampling_max_batches,
            seed=call_seed(self.config.seed, step),
        )
        self.record |= refilled.metrics() | step_metrics.of_rewards(refilled.rewards)
        return refilled.step.prompts, refilled.step.samples, refilled.step.scored

    def save(self, prompts: list[Prompt], samples: list[Sample], scored: Scored, step: int) -> None:
        """Write the step's samples and rewards to RUN_DIR/rollouts if the config asks for it; rank 0 writes."""
        rollout = self.config.rollout
        if self.parallel.rank == 0 and (rollout.save or rollout.only):
            saved = SavedStep(
                step=step + 1,
                temperature=rollout.temperature,
                epoch=self.stream.epoch,
                skipped=self.stream.num_skipped,
                prompts=prompts,
                samples=samples,
                rewards=scored.rewards.flatten().tolist(),
            )
            write_step(self.config.run_dir / "rollouts", saved)

    def evaluate(self, step: int) -> None:
        """Held-out accuracy before the first step, after the last, and every `evaluate.every_steps`."""
        options = self.config.evaluate
        due = options.every_steps and (step % options.every_steps == 0 or step == self.config.num_steps)
        if not (due and self.held_out):
            return
        with self.timer("evaluate"):
            for name, prompts in self.held_out.items():
                sink = self.evaluations.sink(step, name)
                grades = evaluate(name, self.engines, prompts, self.reward, self.config, sink=sink)
                self.record |= {f"eval/{name}/{figure}": value for figure, value in accuracies(grades).items()}

    def log(self, step: int, samples: list[Sample], scored: Scored, stats: GradientStats | None = None) -> None:
        """Write the step's record: metrics.jsonl, tensorboard, console."""
        timing = self.timer.finish_step()
        self.longest_step_s = max(self.longest_step_s, timing["timing_s/step"])
        found = step_metrics.of_step(samples, scored, stats, timing) | step_metrics.of_scoring(self.results)
        found |= self.utilization.metrics(samples, scored, timing) | self.ranks.take(step, timing, self.timer.own)
        self.record = found | self.record | self.engines.metrics()
        self.record |= {"data/epoch": self.stream.epoch, "data/skipped": self.stream.num_skipped}
        self.write(step)

    def write(self, step: int) -> None:
        """Hand the figures collected so far to metrics, console and alarms, and start a new record."""
        written = self.metrics.write(step, self.record)
        self.display.step(step, self.record)
        if self.alarms is not None:
            self.alarms.take(written)
        self.logged, self.record, self.results, self.done = self.record, {}, [], step

    def stopped(self, step: int) -> bool:
        """Whether the run is to end after `step` steps, before its last one, and says so."""
        reason = self.stop.agreed(self.longest_step_s, self.control_group)
        if reason is None or step == self.config.num_steps:
            return False
        self.stopped_by = reason
        self.display.message(f"stopped after step {step} of {self.config.num_steps} ({reason}); go on with --resume")
        return True


@contextmanager
def open_sampling(config: Config) -> Iterator[Sampling]:
    """Check, start and finally end everything that sampling needs; the order is that of what can fail cheaply.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    rank, world_size = layout.rank_from_environment()
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(config.checkpoint))
        inputs = preflight(config, world_size, owns_run_dir=rank == 0)
        if rank == 0 and world_size > 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
            check_port(int(os.environ["MASTER_PORT"]))  # under torchrun the agent holds it already
        parallel = layout.initialize(config.parallel, seed=config.seed)
        stack.callback(layout.shutdown)
        resumed = choose(inputs.checkpoints, parallel.rank, world_size)
        norms = _of_first_rank(inputs.norms)
        if norms is not None:
            config = with_mode(config, norms.mode)
        if parallel.rank == 0:
            write_config(config)
        dist.barrier()  # the run directory exists
        first = parallel.tp_rank == parallel.pp_rank == parallel.cp_rank == 0  # of the ranks of a replica
        share = parallel.dp_rank if first else None
        scoring = build_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
        reward = stack.enter_context(SharedReward(scoring, share, parallel.dp_size))
        engines = open_engines(config, parallel)
        stack.callback(engines.close)
        display = stack.enter_context(open_display(config.log, config.num_steps, rank=parallel.rank))
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
            past = read_metrics(config.run_dir) if parallel.rank == 0 else []
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
            stop=stop,
            control_group=control_group,
            resumed=resumed,
        )


def _metrics_until(config: Config, resumed: Checkpoint | None) -> int | None:
    """Step up to which metrics.jsonl is kept; None for a new one. A run that never saved begins anew."""
    if resumed is not None:
        return resumed.step
    return None if config.checkpoint.resume == "none" else -1


def _prompt_source(inputs: Inputs, engines: RolloutEngine) -> PromptSource:
    if isinstance(engines, ReplayEngine):
        return engines
    assert inputs.stream is not None, "every run but a replay reads its data"
    return inputs.stream


def _opening_lines(
    config: Config, hf_config: Mapping[str, Any], world_size: int, norms: ModeChoice | None, resumed: Checkpoint | None
) -> Iterator[str]:
    """What a run says about itself before it begins."""
    if resumed is not None:
        yield f"going on after step {resumed.step}, from {resumed.path}"
        yield from (f"changed: {change}" for change in changes(resumed, config))
    elif config.checkpoint.resume != "none":
        yield f"no checkpoint in {config.run_dir}: the run begins at step 0"
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
        yield f"{config.num_steps} batches are sampled from {config.model.path}: nothing is trained or evaluated"
    if config.rollout.replay is not None:
        yield f"samples are those of {config.rollout.replay}: nothing is sampled, and no evaluation is made"


def _of_first_rank(norms: ModeChoice | None) -> ModeChoice | None:
    """Ranks may see different amounts of free memory: the first one's choice holds for all."""
    shared = [norms]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _timer(on_phase: Callable[[str | None], None], profiler: Profiler) -> PhaseTimer:
    """On a CPU, with the seconds that this thread computes: they stand still while it waits for other ranks."""
    own = None if torch.cuda.is_available() else time.thread_time
    return PhaseTimer(on_phase, _synchronize, own_clock=own, observer=profiler)


def _synchronize() -> None:
    """A GPU's queue is drained at the ends of a phase, so that no phase pays for another's kernels."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
