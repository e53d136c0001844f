"""A run that trains: sampling, and what each further arrow of the step loop does with the samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch

from oblr_megatron.algo.advantage import AdvantageRule, usual
from oblr_megatron.algo.schedule import Schedule, build_schedule
from oblr_megatron.checkpoint.distributed import load_training_state, load_weights, training_state
from oblr_megatron.checkpoint.hf import export_hf, load_hf_weights
from oblr_megatron.checkpoint.saver import Best, Facts, Saved, Saver
from oblr_megatron.errors import DamagedError, EngineLostError, RunError
from oblr_megatron.gradient.step import TrainingGradient
from oblr_megatron.model.momentum import GradientMomentum, momentum_of
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.qwen3 import Policy, build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.observe import step_metrics
from oblr_megatron.rollout.placement import engine_dtype
from oblr_megatron.sampling import Sampling, open_sampling
from oblr_megatron.weights.export import MegatronWeights

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.types import GradientStats, Sample, Scored

MAX_NONFINITE = 3  # norms of a step; with more of them it is the model that is broken, and the run stops


@dataclass(slots=True, kw_only=True)
class Run(Sampling):
    """What the step loop works with; made by `open_run`, identical on every rank but for the rank's own shards."""

    policy: Policy
    optimizer: PolicyOptimizer
    schedule: Schedule
    gradients: TrainingGradient
    saver: Saver
    momentum: GradientMomentum | None = None  # of the estimator of this name
    usual_norm: float = 0.0  # mean w of the steps so far
    boundary: Facts = field(default_factory=dict)  # what a checkpoint says, as it was when the step began
    unlogged: tuple[list[Sample], Scored, GradientStats] | None = None  # of a step whose update was done

    def begin(self) -> None:
        """Push the weights; before the first step of all, evaluate them, as the record of step 0."""
        self.push(version=self.start)
        if self.start == 0:
            self.evaluate(step=0)
        timing = self.timer.finish_step()
        if any(name.startswith("eval/") for name in self.record):
            self.record |= timing
            self.write(step=0)
        self.record = {}
        self.boundary = self._facts()

    def release(self) -> None:
        """Have engines on the trainer's own GPUs free memory, as rollout.sleep_level says; the next push wakes them."""
        with self.timer("rollout"):
            self.engines.sleep(self.config.rollout.sleep_level)

    def gradient(self, samples: list[Sample], scored: Scored, active: Tensor, step: int) -> GradientStats:
        """Leave the policy gradient in main_grad, summed over all ranks: w, A = r - b(w) and g, in one pass or two.

        Raises:
            RunError: more than a few of the norms are not finite (MAX_NONFINITE); the samples are written down first.
        """
        config = self.config
        advantage = AdvantageRule(scored, config, self.usual_norm)
        wanted = config.uses_norms
        exact = self._check(samples, active, step) if wanted else None
        found = self.gradients(
            samples, advantage, active, norms_wanted=wanted, token_coefficients_of=advantage.of_tokens, timer=self.timer
        )
        norms_sq = found.norms_sq.view(len(active), -1)
        if exact is not None:
            measured = exact > 0
            self.record["gradnorm/estimate_corr"] = step_metrics.correlation(exact[measured], norms_sq[measured])
        if wanted:
            self._refuse_broken(norms_sq, samples)
            self.usual_norm = usual(norms_sq, self.usual_norm)
        self.record |= step_metrics.of_baseline(config.algo, scored, norms_sq, exact=config.measures_norms)
        stats = self._for_estimator(found.stats, advantage, norms_sq)
        self.unlogged = samples, scored, stats
        return stats

    def _for_estimator(self, stats: GradientStats, advantage: AdvantageRule, norms_sq: Tensor) -> GradientStats:
        """The stats with what the configured estimator of the signal wants to know of the gradient in main_grad."""
        if self.config.algo.snr.estimator == "samples":
            coefficients = advantage(range(len(norms_sq)), norms_sq)
            stats = replace(stats, sample_sq_norm=float((coefficients**2 * norms_sq.nan_to_num(posinf=0.0)).sum()))
        if self.momentum is not None:
            with self.timer("gradient"):
                stats = replace(stats, momentum_dot=self.momentum.take(stats.sq_norm))
        return stats

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
        self.record |= {"lr": lr, **self.schedule.metrics()}

    def push(self, version: int) -> None:
        """Send the weights to the engines under a new version number, that of the updates so far."""
        self.version = version
        self.record["weights/version"] = version
        with self.timer("push"):
            if self.parallel.device.type == "cuda" and self.config.rollout.takes_turns:
                self.gradients.release()  # the engines' turn with the memory
            self.engines.push(MegatronWeights(self.policy, engine_dtype(self.config)), version)

    def checkpoint(self, step: int) -> bool:
        """Save the state after `step` steps if that is due, and tell whether the run stops here; collective.

        Raises:
            RunError: the run is to stop, and its state cannot be saved.
        """
        self.unlogged, self.boundary = None, self._facts()
        last, stops = step == self.config.num_steps, self.stopped(step)
        with self.timer("checkpoint"):
            if stops or self.saver.due(step, self.config.num_steps, self.logged):
                self._save(step, self.boundary, background=not (stops or last))
            saved = self.saver.wait() if stops or last else self.saver.report()
        self._tell(saved)
        if stops and saved is not None and saved.failure is not None:
            raise RunError(str(saved))
        return stops

    def export(self) -> None:
        """Write RUN_DIR/hf, and RUN_DIR/hf_best of the best checkpoint, if the config asks for it.

        The policy may hold the best weights afterwards instead of the last.
        """
        if not self.config.checkpoint.export_hf:
            return
        self._export("hf")
        best = self.saver.path_of_best()
        if best is not None:
            load_weights(self.policy, best)
            self._export("hf_best")

    def rescue(self) -> None:
        """Save the state of a run whose engines are lost for good; collective.

        In the middle of a step that is the state before it; after the update, the state after it, and what is known of
        the step is logged. Does nothing before the first update.
        """
        if self.unlogged is not None and self.version > self.boundary["step"]:
            self.log(self.version, *self.unlogged)
            self.boundary = self._facts()
        step = self.boundary.get("step", self.start)
        if step == self.start:
            return
        self._save(step, self.boundary, background=False)
        self.display.message(f"the engines are lost; {self.saver.wait()}")

    def _save(self, step: int, facts: Facts, *, background: bool) -> None:
        self._tell(self.saver.wait())
        state = training_state(self.policy, self.optimizer, self.momentum)
        facts = facts | {"config": self.config.model_dump(mode="json")}
        self.saver.save(step, state, facts, self.logged, background=background)

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self.display.message(str(saved))

    def _facts(self) -> Facts:
        """What a resumed run needs beside tensors and the configuration; see `open_run` for who takes it up."""
        return {
            "step": self.version,
            "data": self.stream.state_dict(),
            "schedule": self.schedule.state_dict(),
            "usual_norm": self.usual_norm,
        }

    def _export(self, name: str) -> None:
        target = self.config.run_dir / name
        if self.config.checkpoint.resume != "none" and self.parallel.rank == 0:
            shutil.rmtree(target, ignore_errors=True)  # of the run as it was
        export_hf(self.policy, self.config.model.path, target)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """`open_sampling` with the model and all that trains it; engines start while the model is built.

    When the engines are lost for good, or do not get the weights whole, the weights are saved first: every rank learns
    of these at the same place, and saving is collective.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    with open_sampling(config) as sampling:
        config = sampling.config
        policy = build_policy(sampling.model.hf_config(), config.model, sampling.parallel, config.parallel)
        resumed = sampling.resumed
        penalised = config.algo.kl_coefficient > 0
        if resumed is None or penalised:
            load_hf_weights(policy, config.model.path)
        reference = Reference(policy) if penalised else None  # before a resumed run's own weights
        optimizer, momentum = PolicyOptimizer(policy, config.optimizer), momentum_of(policy, config)
        schedule = build_schedule(
            config.algo,
            config.optimizer,
            num_steps=config.num_steps,
            num_prompts=config.num_prompts,
            seed=config.seed,
        )
        best = None
        if resumed is not None:
            load_training_state(policy, optimizer, resumed.path, momentum)
            schedule.load_state_dict(resumed.state["schedule"])
            best = resumed.state["best"] and Best(*resumed.state["best"])
        run = Run(
            **{part.name: getattr(sampling, part.name) for part in fields(sampling)},
            policy=policy,
            optimizer=optimizer,
            schedule=schedule,
            gradients=TrainingGradient(policy, config, reference),
            saver=Saver(config, sampling.parallel, sampling.model, best),
            momentum=momentum,
        )
        if resumed is not None:
            run.version, run.usual_norm = resumed.step, resumed.state["usual_norm"]
        try:
            yield run
        except (EngineLostError, DamagedError):
            run.rescue()
            raise
        finally:
            run.saver.close()
