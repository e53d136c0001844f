"""A run: its parts, opened in order and closed in reverse, and what each arrow of the step loop does with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron import figures
from oblr_megatron.algo.baseline import BASELINES
from oblr_megatron.algo.schedule import Schedule, build_schedule
from oblr_megatron.algo.weighing import Weighing, usual
from oblr_megatron.checkpoint.hf import export_hf, load_hf_weights
from oblr_megatron.checks import check_port
from oblr_megatron.console import Display, open_display
from oblr_megatron.errors import RunError
from oblr_megatron.evaluate import evaluate
from oblr_megatron.gradient import TrainingGradient
from oblr_megatron.gradnorm.choose import Choice, with_mode
from oblr_megatron.metrics import MetricsWriter
from oblr_megatron.model import parallel as layout
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.qwen3 import Policy, build_policy
from oblr_megatron.preflight import preflight, write_config
from oblr_megatron.rewards.base import Reward
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.rewards.shared import SharedReward
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.placement import engine_dtype
from oblr_megatron.timing import PhaseTimer
from oblr_megatron.types import Judged
from oblr_megatron.weights.export import MegatronWeights

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.data.prompts import PromptStream
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.types import GradientStats, Prompt, Sample

MAX_NONFINITE = 3  # norms of a step; with more of them it is the model that is broken, and the run stops


@dataclass(slots=True)
class Run:
    """What the step loop works with; made by `open_run`, identical on every rank but for the rank's own shards."""

    config: Config
    parallel: Parallel
    policy: Policy
    optimizer: PolicyOptimizer
    schedule: Schedule
    engines: ColocatedEngines
    reward: Reward
    stream: PromptStream
    held_out: dict[str, list[Prompt]]
    metrics: MetricsWriter
    display: Display
    timer: PhaseTimer
    gradients: TrainingGradient
    usual_norm: float = 0.0  # mean w of the steps so far
    record: dict[str, float] = field(default_factory=dict)  # figures of the step in progress

    def rollout(self, prompts: list[Prompt], step: int) -> list[Sample]:
        """N = Q * G samples in prompt-major order, the same on every rank, drawn from the current weights."""
        config = self.config
        assert self.engines.version == step, f"step {step} would sample from weights {self.engines.version}: off-policy"
        with self.timer("rollout"):
            return self.engines.generate(
                prompts,
                group_size=config.group_size,
                temperature=config.rollout.temperature,
                max_tokens=config.rollout.max_response_tokens,
                seed=config.seed * 1_000_003 + step,
            )

    def judge(self, prompts: list[Prompt], samples: list[Sample]) -> Judged:
        """Rewards [Q, G] of a step's samples, on every rank."""
        group = self.config.group_size
        with self.timer("reward"):
            result = self.reward.score(prompts, samples)
        return Judged(
            rewards=torch.tensor(result.rewards, dtype=torch.float64).view(-1, group),
            lengths=torch.tensor([len(sample.response_ids) for sample in samples]).view(-1, group),
            failures=result.failures + result.timeouts,
        )

    def gradient(self, samples: list[Sample], judged: Judged, active: Tensor, step: int) -> GradientStats:
        """Leave the policy gradient in main_grad, summed over all ranks: w, A = r - b(w) and g, in one pass or two.

        Raises:
            RunError: more than a few of the norms are not finite (MAX_NONFINITE); the samples are written down first.
        """
        config = self.config
        weighing = Weighing(judged, config, self.usual_norm)
        wanted = BASELINES[config.algo.baseline].needs_norms or config.gradnorm.always
        exact = self._check(samples, active, step) if wanted else None
        found = self.gradients(samples, weighing, active, norms_wanted=wanted, timer=self.timer)
        norms_sq = found.norms_sq.view(len(active), -1)
        if exact is not None:
            measured = exact > 0
            self.record["gradnorm/estimate_corr"] = figures.correlation(exact[measured], norms_sq[measured])
        if wanted:
            self._refuse_broken(norms_sq, samples)
            self.usual_norm = usual(norms_sq, self.usual_norm)
        self.record |= figures.of_baseline(config.algo, judged, norms_sq)
        return found.stats

    def _check(self, samples: list[Sample], active: Tensor, step: int) -> Tensor | None:
        """Exact norms [Q, G] of a few prompts, where estimates are due to be held against them; before the gradient."""
        options = self.config.gradnorm
        if options.source == "exact" or not options.check_every or step % options.check_every:
            return None
        candidates = active.nonzero().flatten()
        few = -(-options.check_samples // self.config.group_size)
        chosen = torch.zeros_like(active)
        chosen[candidates[:: max(1, len(candidates) // few)][:few]] = True
        with self.timer("gradnorm"):
            return self.gradients.norms(samples, chosen, source="exact").view(len(active), -1)

    def _refuse_broken(self, norms_sq: Tensor, samples: list[Sample]) -> None:
        """Count the norms that are no numbers; end the run when they are many."""
        broken = (~norms_sq.isfinite()).flatten().nonzero().flatten().tolist()
        self.record["gradnorm/nonfinite"] = len(broken)
        if len(broken) > MAX_NONFINITE:
            path = self.config.run_dir / "nonfinite_samples.jsonl"
            if self.parallel.rank == 0:
                path.write_text("".join(json.dumps(asdict(samples[n])) + "\n" for n in broken), encoding="utf-8")
            raise RunError(
                f"{len(broken)} of {norms_sq.numel()} gradient norms are not finite: the model or its input is broken; "
                f"the samples are in {path}"
            )

    def update(self, stats: GradientStats, step: int) -> None:
        """Clip, and step the optimizer at the schedule's rate; with no gradient at all nothing moves but the log."""
        with self.timer("optimizer"):
            lr = self.schedule.rate(step)
            if stats.sq_norm != 0:  # clip refuses what is not a number
                self.optimizer.clip(stats.sq_norm)
                self.optimizer.step(lr)
            self.schedule.observe(stats)
        self.record |= {"lr": lr, **self.schedule.figures()}

    def push(self, version: int) -> None:
        """Send the weights to the engines under a new version number."""
        with self.timer("push"):
            self.engines.push(MegatronWeights(self.policy, engine_dtype(self.config)), version)
        self.record["weights/version"] = version

    def evaluate(self, step: int) -> None:
        """Held-out accuracy before the first step, after the last, and every `evaluate.every_steps`."""
        options = self.config.evaluate
        due = options.every_steps and (step % options.every_steps == 0 or step == self.config.num_steps)
        if not (due and self.held_out):
            return
        with self.timer("evaluate"):
            for name, prompts in self.held_out.items():
                self.record |= evaluate(name, self.engines, prompts, self.reward, self.config)

    def begin(self) -> None:
        """Close the accounts of what came before the first step: an evaluation, if any, is the record of step 0."""
        timing = self.timer.finish_step()
        if any(name.startswith("eval/") for name in self.record):
            self.record |= timing
            self.write(step=0)
        self.record = {}

    def log(self, step: int, samples: list[Sample], judged: Judged, stats: GradientStats) -> None:
        """Write the step's record: metrics.jsonl, tensorboard, console."""
        timing = self.timer.finish_step()
        self.record |= figures.of_step(samples, judged, stats, timing)
        self.record |= {"data/epoch": self.stream.epoch, "data/skipped": len(self.stream.skipped)}
        self.write(step)

    def write(self, step: int) -> None:
        """Hand the figures collected so far to metrics and console, and start a new record."""
        self.metrics.write(step, self.record)
        self.display.step(step, self.record)
        self.record = {}

    def export(self) -> None:
        """Write RUN_DIR/hf if the config asks for it."""
        if self.config.checkpoint.export_hf:
            export_hf(self.policy, self.config.model.path, self.config.run_dir / "hf")


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Check, start and finally end everything a run needs; the order is that of what can fail cheaply.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    inputs = preflight(config, world_size, owns_run_dir=rank == 0)
    if rank == 0 and world_size > 1 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        check_port(int(os.environ["MASTER_PORT"]))  # under torchrun the agent holds it already
    with ExitStack() as stack:
        parallel = layout.initialize(config.parallel, seed=config.seed)
        stack.callback(layout.shutdown)
        norms = _of_first_rank(inputs.norms)
        config = with_mode(config, norms.mode)
        if parallel.rank == 0:
            write_config(config)
        dist.barrier()  # the run directory exists
        share = parallel.dp_rank if parallel.tp_rank == 0 and parallel.pp_rank == 0 else None
        reward = stack.enter_context(SharedReward(build_reward(config.reward), share, parallel.dp_size))
        engines = ColocatedEngines(config, parallel)
        stack.callback(engines.close)
        policy = build_policy(inputs.model.hf_config(), config.model, parallel, config.parallel)
        load_hf_weights(policy, config.model.path)
        optimizer = PolicyOptimizer(policy, config.optimizer)
        display = stack.enter_context(open_display(config.log, config.num_steps, rank=parallel.rank))
        display.message(f"norms by {norms.mode}: {norms.reason}")
        display.message(f"memory: {norms.estimate.table()}")
        metrics = stack.enter_context(
            MetricsWriter(config.run_dir, config.log, rank=parallel.rank, world_size=world_size)
        )
        yield Run(
            config=config,
            parallel=parallel,
            policy=policy,
            optimizer=optimizer,
            schedule=build_schedule(
                config.algo, config.optimizer, num_steps=config.num_steps, num_prompts=config.num_prompts
            ),
            engines=engines,
            reward=reward,
            stream=inputs.stream,
            held_out=inputs.held_out,
            metrics=metrics,
            display=display,
            timer=PhaseTimer(on_phase=display.phase, synchronize=_synchronize),
            gradients=TrainingGradient(policy, config),
        )


def _of_first_rank(norms: Choice) -> Choice:
    """Ranks may see different amounts of free memory: the first one's choice holds for all."""
    shared = [norms]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _synchronize() -> None:
    """A GPU's queue is drained at the ends of a phase, so that no phase pays for another's kernels."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
