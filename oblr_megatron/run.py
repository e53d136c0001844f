"""A run that trains: the arrows of the step loop after sampling."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oblr_megatron.algo.advantage import running_mean_norm
from oblr_megatron.algo.formulas import History
from oblr_megatron.algo.noise_split import NoiseSplit
from oblr_megatron.algo.pools import Pools, pools_of
from oblr_megatron.algo.schedule import Schedule, build_schedule
from oblr_megatron.checkpoint.distributed import load_training_state, load_weights, training_state
from oblr_megatron.checkpoint.hf import export_adapter, export_hf, load_hf_weights
from oblr_megatron.checkpoint.resume import Checkpoint, damage_of, uses_base
from oblr_megatron.checkpoint.saver import Facts, Saved, Saver
from oblr_megatron.checkpoint.store import read_manifest
from oblr_megatron.checks.run_dir import ADAPTERS
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.config.reward import scores_of
from oblr_megatron.errors import BrokenWeightsError, RunError, UserError
from oblr_megatron.formatting import flatten
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.lora.adapters import initialize
from oblr_megatron.model.megatron_versions import compile_recomputation
from oblr_megatron.model.momentum import GradientMomentum, momentum_of
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.model.reference import Reference
from oblr_megatron.observe import step_metrics
from oblr_megatron.observe.step_metrics import StepRecord
from oblr_megatron.opening import open_sampling
from oblr_megatron.rollout.placement import adapter_shape, engine_dtype
from oblr_megatron.sampling import Sampling
from oblr_megatron.weights.adapter import AdapterShape, AdapterWeights
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.export_adapter import MegatronAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from oblr_megatron.config import Config
    from oblr_megatron.types import GradientStats, Prompt
    from oblr_megatron.weights.manifest import Source


RECOMPUTED = {"layernorm", "moe_act"}
"""Values of parallel.recompute_modules for which megatron-core compiles an extension."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The open parts of a run that trains, the same on every rank except for the rank's own shards; see `open_run`."""

    sampling: Sampling
    policy: Policy
    optimizer: PolicyOptimizer
    schedule: Schedule
    step_gradient: StepGradient
    saver: Saver
    noise: NoiseSplit
    pools: Pools | None = None  # rewards of earlier steps, for the baselines that read them
    momentum: GradientMomentum | None = None  # for the estimator with this name
    running_mean_norm: float = 0.0  # mean of w over the steps so far
    updates: int = 0  # updates of the optimizer so far
    facts: Facts = field(default_factory=dict)  # what a checkpoint records, as of the last step boundary
    logged: StepRecord = field(default_factory=lambda: StepRecord(done=0))  # the step before that boundary
    unsaved: str | None = None  # why the latest save failed
    updated: StepRecord | None = None  # a step with an update that is not logged yet

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.sampling.config

    def begin(self) -> bool:
        """Push the weights. Evaluate them before the very first step, logged as step 0, or if an earlier process could
        not: after a step's update it had lost its engines, or its reward.

        Returns whether the run stops here. Engines take minutes to start, and the evaluation may take longer than a
        step, so that a signal may come meanwhile. Collective.
        """
        sampling, resumed = self.sampling, self.sampling.resumed
        record = StepRecord(done=sampling.start)
        self.push(version=sampling.start, record=record)
        if resumed is None or not resumed.state.get("evaluated", True):
            if sampling.stopped(sampling.start):
                return True
            sampling.evaluate(record)
        timing = sampling.timer.finish_step()
        sampling.evaluation_s = timing.get("timing_s/evaluate", sampling.evaluation_s)
        record.metrics |= timing
        if record.evaluated and resumed is not None:  # the step's other metrics are logged
            record.metrics = {name: value for name, value in record.metrics.items() if name.startswith("eval/")}
            self.saver.evaluated(resumed.path, record.done, record.metrics)
        if record.evaluated:
            sampling.write(record)
            self.logged = record
        self.facts = self._facts()
        return sampling.stopped(sampling.start)

    def streams(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the gradient of a step may begin before all its prompts are finished (`rollout.overlap`).

        A pooled baseline needs a history of every prompt. Without one it takes the other prompts' mean reward, as in
        the first step of a run. Which prompts are finished together depends on the lengths of their responses, so that
        the mean of a wave would bias the gradient.
        """
        if self.config.rollout.overlap != "stream" or self.pools is None:
            return self.config.rollout.overlap == "stream"
        expected = self.history(prompts).expected
        return expected is not None and not bool(expected.isnan().any())

    def gradient(self, record: StepRecord) -> StepGradient:
        """The gradient of a step, still empty."""
        return self.step_gradient.begin(record.done)

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedule.rate(self.updates)

    def observe(self, gradient: StepGradient, record: StepRecord) -> None:
        """Let the schedule and the baseline learn from the step, for later steps and for the metrics.

        They skip a step without any score. Its rewards are 0 because the reward failed for every response.
        """
        config, scored, stats, norms_sq = self.config, record.scored, gradient.stats, gradient.norms_sq
        assert scored is not None, "a step has rewards"
        record.stats = gradient.mean_stats
        if not record.unrewarded:
            self.schedule.observe(stats)
        history = self.history(record.prompts)
        record.metrics["gradnorm/nonfinite"] = gradient.num_broken
        if config.uses_norms:
            record.metrics |= step_metrics.of_norms(norms_sq, gradient.exact_sq)
            record.metrics |= step_metrics.of_energies(
                config.algo, gradient.coefficients, norms_sq, history, gradient.kept
            )
            self.running_mean_norm = running_mean_norm(norms_sq, self.running_mean_norm)
        if config.algo.keep < 1:
            record.metrics["keep/tokens"] = float(scored.lengths[gradient.kept > 0].sum() / scored.lengths.sum())
        exact = config.measures_norms and config.algo.keep == 1
        record.metrics |= step_metrics.of_baseline(config.algo, scored, norms_sq, history, exact=exact)
        if not record.unrewarded:
            self.noise.observe(stats)
            if self.pools is not None:
                self.pools.observe(record.prompts, scored, norms_sq, history, gradient.kept)
            record.metrics |= self.schedule.metrics() | self.noise.metrics()
        if self.pools is not None:
            record.metrics |= self.pools.metrics()

    def history(self, prompts: Sequence[Prompt]) -> History:
        """Knowledge from earlier steps: the mean norm, and about these prompts what the baseline reads."""
        history = History() if self.pools is None else self.pools.history(prompts)
        return replace(history, running_mean_norm=self.running_mean_norm)

    def update(self, stats: GradientStats, lr: float, record: StepRecord) -> None:
        """Clip the gradient and step the optimizer. A gradient of zero, or without rewards, changes nothing."""
        with self.sampling.timer("optimizer"):
            if stats.sq_norm != 0 and not record.unrewarded:  # clip refuses a norm that is not finite
                factor = self.optimizer.clip(stats.sq_norm)
                record.clip_factors.append(factor)
                record.metrics["optimizer/clip_factor"] = statistics.median(record.clip_factors)
                self.optimizer.step(lr)
        record.metrics["lr"] = lr
        self.updates += 1
        self.updated = record

    def push(self, version: int, record: StepRecord) -> None:
        """Send the weights to the engines under a new version, the number of steps done."""
        sampling = self.sampling
        sampling.version = version
        record.metrics["weights/version"] = version
        with sampling.timer("push"):
            self.optimizer.offload()  # before the engines wake
            if sampling.parallel.device.type == "cuda" and self.config.rollout.takes_turns:
                self.step_gradient.release()  # the engines need the memory now
            sampling.engines.push(self._weights(), version)

    def _weights(self) -> Source:
        """What a push holds: all weights, with adapters merged; or the adapter alone."""
        config, dtype = self.config, engine_dtype(self.config)
        adapter = adapter_shape(config)
        if adapter is None:
            return MegatronWeights(self.policy, dtype)
        base, lora = MegatronWeights(self.policy, dtype, merged=False), config.model.lora
        return AdapterWeights(MegatronAdapter(self.policy, adapter, dtype), base, lora.alpha / lora.rank)

    def checkpoint(self, record: StepRecord) -> bool:
        """Save the state after a step if that is due; whether the run stops here. Collective.

        Raises:
            RunError: the run is to stop, and its state cannot be saved.
        """
        step, num_steps = record.done, self.config.num_steps
        self.updated, self.logged = None, record
        self.facts = self._facts() | {"evaluated": not record.unscored}
        last, stops = step == num_steps, self.sampling.stopped(step)
        with self.sampling.timer("checkpoint"):
            if stops or self.saver.due(step, num_steps, record.metrics):
                self._save(background=not (stops or last))
            saved = self.saver.wait() if stops or last else self.saver.report()
        self._tell(saved)
        if saved is not None and saved.failure is not None:
            self.unsaved = str(saved)
            if stops:
                raise RunError(self.unsaved)
        elif saved is not None:
            self.unsaved = None
        return stops

    def export(self) -> None:
        """Write RUN_DIR/hf, and RUN_DIR/hf_best from the best checkpoint, if the config asks for them.

        Afterwards the policy may hold the best weights instead of the last. If hf cannot be written and no checkpoint
        has its weights (`checkpoint.every_steps` 0), one is saved.

        Raises:
            RunError: the last checkpoint was not saved, so the run is not finished. Or the best is damaged. Or a
                directory was not written.
        """
        self.sampling.stop.closing = True
        failures = [] if self.unsaved is None else [f"{self.unsaved}; a resumed run begins at an older step"]
        if self.config.checkpoint.export_hf:
            unwritten = self._export("hf")
            step = self.facts.get("step", self.sampling.start)
            if unwritten and step not in (self.sampling.start, self.saver.newest):  # the weights are nowhere else
                self._save(background=False)
                self._tell(self.saver.wait())
            failures += unwritten
            best = self.saver.path_of_best()
            damage = None if best is None else self._damage_of(best)
            if damage is not None:
                failures.append(f"hf_best was not written: {damage}")
            elif best is not None:
                load_weights(self.policy, best)
                failures += self._export("hf_best")
        if failures:
            raise RunError("; ".join(failures))

    def rescue(self) -> None:
        """Save the state of a run that cannot go on. Collective.

        A loss before the update saves the state before the step. A loss after it saves the state after the step and
        logs the metrics so far. Before the first update there is nothing to save, and a state is not saved twice.
        Nothing is saved between the updates of a step: its weights would not fit the state.
        """
        sampling = self.sampling
        if self.updated is not None and sampling.version == self.facts["step"]:
            sampling.display.message("the run cannot go on; its state is not saved between the updates of a step")
            return
        if self.updated is not None:
            sampling.log(self.updated)
            self.logged, self.facts = self.updated, self._facts()
            done = self.updated.evaluated and not self.updated.unscored  # if not, the resumed run does it
            self.facts["evaluated"] = done or not sampling.evaluation_due(self.updated.done)
        if self.facts.get("step", sampling.start) == sampling.start:
            return
        self._tell(self.saver.wait())
        if self.saver.newest == self.facts["step"]:
            sampling.display.message(f"the run cannot go on; step {self.saver.newest} is saved")
            return
        self._save(background=False)
        sampling.display.message(f"the run cannot go on; {self.saver.wait()}")

    def _damage_of(self, path: Path) -> UserError | None:
        """Why a checkpoint cannot be read, equal on every rank. Nothing is unpickled before its checksum matched."""
        sampling, seconds = self.sampling, self.config.parallel.distributed_timeout_s
        try:
            manifest = sampling.collectives.together(lambda: read_manifest(path), what=f"{path}", seconds=seconds)
        except UserError as error:
            return error
        return damage_of(Checkpoint(path, manifest), sampling.parallel.rank, sampling.parallel.world_size)

    def _save(self, *, background: bool) -> None:
        """Save the state at the last step boundary."""
        self._tell(self.saver.wait())
        state = training_state(self.policy, self.optimizer, self.momentum)
        facts = self.facts | {"config": self.config.model_dump(mode="json")}
        self.saver.save(self.facts["step"], state, facts, self.logged.metrics, background=background)

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self.sampling.display.message(str(saved))

    def _facts(self) -> Facts:
        """State that a resumed run needs in addition to tensors and configuration; see `restore`."""
        return {
            "step": self.sampling.version,
            "base": self.sampling.model.fingerprint if uses_base(self.config) else None,
            "data": self.sampling.position,
            "schedule": self.schedule.state_dict(),
            "updates": self.updates + self.schedule.ahead,
            "running_mean_norm": self.running_mean_norm,
            "noise": self.noise.state_dict(),
            "pools": None if self.pools is None else self.pools.state_dict(),
        }

    def restore(self, facts: Facts) -> None:
        """Continue from what a checkpoint records of norms, noise and pools.

        Another `gradnorm.source` measures w in another unit. Averages of w, and pools with w as weights, then begin
        again. So do all pools, and averages of noise, under another reward.
        """
        self.schedule.ahead = facts.get("updates", self.updates) - self.updates
        before, now = _scores(facts["config"]), _scores(self.config.model_dump(mode="json"))
        self.noise.load_state_dict(facts["noise"] | {"scores": before})
        comparable = facts["config"]["gradnorm"]["source"] == self.config.gradnorm.source
        if comparable:
            self.running_mean_norm = facts["running_mean_norm"]
        comparable |= not facts_of(self.config.algo.baseline).pools_norms
        comparable &= before == now
        if self.pools is not None and facts["pools"] and comparable:  # None before the run had such a baseline
            self.pools.load_state_dict(facts["pools"])

    def _export(self, name: str) -> list[str]:
        """Write the weights, and adapters on their own; return what failed, equal on every rank.

        The export of an earlier process stays until then, because model.path may be in it.
        """
        replaces, lora, model = self.config.checkpoint.resume != "none", self.config.model.lora, self.sampling.model
        failures = []
        for own in (ADAPTERS[name], name) if lora.rank else (name,):  # one may fit where the other does not
            target = self.config.run_dir / own
            try:
                if own == name:
                    export_hf(self.policy, model, target, replaces=replaces)
                else:
                    shape, base = AdapterShape(lora.rank, lora.targets), model.path.absolute()
                    export_adapter(self.policy, shape, lora.alpha, base, target, replaces=replaces)
            except (UserError, RunError) as error:
                failures.append(f"{own} was not written: {error}")
        return failures


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Open a run that trains: `open_sampling`, the model, its optimizer and its schedule.

    Raises:
        UserError: bad input, found before the process group or any engine is started.
    """
    with open_sampling(config) as sampling:
        config = sampling.config
        sampling.release()  # the trainer's parts are made, and loaded, on the device; the first push wakes the engines
        if config.parallel.recompute_granularity == "selective" and RECOMPUTED & set(config.parallel.recompute_modules):
            compile_recomputation()
        policy = build_policy(sampling.model.hf_config(), config.model, sampling.parallel, config.parallel)
        resumed = sampling.resumed
        penalised, adapted = config.algo.kl_coefficient > 0, config.model.lora.rank > 0
        if resumed is None or penalised or adapted:
            sampling.collectives.together(
                lambda: load_hf_weights(policy, config.model.path),
                what="the weights of the model directory",
                seconds=config.parallel.distributed_timeout_s,
            )
        initialize(policy, config.seed)
        reference = Reference(policy) if penalised else None  # from the model path, not from the checkpoint
        optimizer, momentum = PolicyOptimizer(policy, config.optimizer), momentum_of(policy, config)
        scores = _scores(config.model_dump(mode="json"))
        schedule = build_schedule(
            config.algo,
            config.optimizer,
            num_steps=config.num_steps * config.algo.updates_per_batch,
            num_prompts=config.per_update.num_prompts,
            group_size=config.group_size,
            scores=scores,
            chosen=config.rollout.dynamic_sampling,
        )
        if resumed is not None:
            load_training_state(policy, optimizer, resumed.path, momentum)
            schedule.load_state_dict(resumed.state["schedule"] | {"scores": _scores(resumed.state["config"])})
        run = Run(
            sampling=sampling,
            policy=policy,
            optimizer=optimizer,
            schedule=schedule,
            step_gradient=StepGradient(
                policy, config, reference, momentum, timer=sampling.timer, with_routes=sampling.with_routes
            ),
            saver=Saver(config, sampling.parallel, sampling.model, None if resumed is None else resumed.state),
            momentum=momentum,
            noise=NoiseSplit(
                config.algo,
                config.per_update.num_prompts,
                config.group_size,
                scores=scores,
                router_losses=config.model.router_losses,
                chosen=config.rollout.dynamic_sampling,
            ),
            pools=pools_of(config.algo),
            updates=sampling.start * config.algo.updates_per_batch,
        )
        sampling.streams = run.streams
        if resumed is not None:
            sampling.version = resumed.step
            run.restore(resumed.state)
        try:
            yield run
        finally:
            run.saver.close()


def _scores(config: Mapping[str, Any]) -> str:
    """`scores_of` of a config as JSON."""
    return scores_of(flatten(config).get)


@contextmanager
def rescued(run: Run) -> Iterator[None]:
    """Save the state before an error goes on that all ranks raise together, because saving is collective.

    Examples: the engines are lost for good, a reward that worked fails for every response, samples cannot be written.
    """
    try:
        yield
    except Exception as error:  # a push may raise any class on all ranks, such as CUDA out of memory
        if getattr(error, "raised_on_all_ranks", False) and not isinstance(error, BrokenWeightsError):
            run.rescue()
        raise
