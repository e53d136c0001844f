"""Train one toy run.

The step is that of oblr_megatron/step_loop.py, with the package's baselines, loss, signal-to-noise estimators and
schedules. A tiny transformers model replaces megatron-core, and a plain sampling loop replaces vLLM.
RUN_DIR/metrics.jsonl uses the same metric names.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from oblr_megatron.algo.advantage import running_mean_norm
from oblr_megatron.algo.baseline import active_groups
from oblr_megatron.algo.formulas import NO_HISTORY
from oblr_megatron.algo.noise_split import NoiseSplit
from oblr_megatron.algo.pools import pools_of
from oblr_megatron.algo.schedule import Schedule, build_schedule
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.config.baselines import facts_of
from oblr_megatron.config.section import Section
from oblr_megatron.engine.protocol import call_seed, prompt_seed
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import MetricsWriter, write_whole
from oblr_megatron.observe import step_metrics
from oblr_megatron.types import Prompt, Scored
from studies.estimator import Batch, Estimate, Estimator, NormSource
from studies.policy import Drawn, ToyPolicy
from studies.rivals import RIVALS, RivalName
from studies.start import load, task_named
from studies.tasks import Row, Skill, Task

ROWS_AT_ONCE = 512  # of an offline pass
EVALUATION_SEED = 7_919  # every evaluation of every run uses the same random numbers


class ToyConfig(Section):
    """Config of a toy run. `algo` and `optimizer` are the sections of a training run's config."""

    task: str
    """Name of a task in studies/tasks, or of the recipe."""
    skill: Skill = "middle"
    """Skill of the warm-started model."""
    start_dir: Path
    """Start of this task, see studies/start.py."""
    recipe: dict[str, Any] | None = None
    """Settings of a task that is the config of a training run, see studies/recipe.py. Not for this trainer."""
    run_dir: Path
    """Directory the run writes."""
    seed: int = Field(0, ge=0)
    """Seed of prompt order and sampling."""
    train_rows: int | None = Field(None, ge=1)
    """The run sees only the first so many training questions; None: all."""
    num_steps: int = Field(120, ge=1)
    """Optimizer steps."""
    num_prompts: int = Field(16, ge=1)
    """Q, prompts per step."""
    group_size: int = Field(8, ge=1)
    """G, responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature, in training and evaluation."""
    evaluate_every: int = Field(10, ge=1)
    """Steps between evaluations. One evaluation also runs before training and one after it."""
    evaluation_samples: int = Field(4, ge=1)
    """Sampled responses per held-out prompt, besides the greedy one."""
    norm_source: NormSource = "exact"
    """What baselines and pools read as w: gradnorm.source of a training run. Statistics use exact norms."""
    rival: RivalName = "none"
    """A published method that replaces algo.baseline, which must be "none" (studies/rivals.py)."""
    algo: AlgoConfig = AlgoConfig()
    """As in a training run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As in a training run."""

    @model_validator(mode="after")
    def _whole_folds(self) -> Self:
        """Folds hold whole prompts and have equal size."""
        if self.num_prompts % self.algo.snr.num_folds:
            raise ValueError(
                f"num_prompts {self.num_prompts} is not a multiple of algo.snr.num_folds {self.algo.snr.num_folds}"
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        """A baseline of the group has more than one response."""
        name, baseline = self.rival, self.algo.baseline
        if name != "none" and baseline != "none":
            raise ValueError(f"rival {name!r} replaces algo.baseline {baseline!r}; set that to 'none'")
        if name != "none" and self.algo.keep < 1:
            raise ValueError(f"rival {name!r} works without algo.keep alone")
        if self.algo.keep < 1 and (facts_of(baseline).needs_norms or self.algo.norm_power or self.algo.kl_coefficient):
            raise ValueError("algo.keep below 1 needs coefficients that read no norm of their step, and no KL penalty")
        groups = "any" if name == "none" else RIVALS[name].groups
        if self.group_size == 1 and (groups == "several" or facts_of(baseline).needs_group):
            named = baseline if name == "none" else name
            raise ValueError(f"group_size is 1, but baseline {named!r} needs other responses in the group")
        if self.group_size > 1 and groups == "one":
            raise ValueError(f"rival {name!r} takes one response to a prompt, not {self.group_size}")
        return self


class ToyRun:
    """The state of one run. Call `step(0)`, `step(1)`, ... up to num_steps - 1, in order."""

    def __init__(self, config: ToyConfig) -> None:
        self.config, self.task = config, task_named(config.task)
        train, self.held_out = self.task.rows()
        self.train = train[: config.train_rows]
        self.policy = load(config.start_dir, self.task, temperature=config.temperature)
        penalised = config.algo.kl_coefficient > 0
        reference = load(config.start_dir, self.task, temperature=config.temperature) if penalised else None
        scale = float(self.task.max_response_tokens)
        self.rival = None if config.rival == "none" else RIVALS[config.rival](len(self.train), config.seed)
        self._estimator = Estimator(self.policy, config.algo, reference, config.norm_source, scale, self.rival)
        self._optimizer = make_optimizer(self.policy, config.optimizer)
        self._schedule = build_schedule(
            config.algo, config.optimizer, num_prompts=config.num_prompts, num_steps=config.num_steps
        )
        self._pools = pools_of(config.algo)
        size = config.group_size if self.rival is None else 1  # no split: which responses its b reads is not known
        self._split = NoiseSplit(config.algo, config.num_prompts, size)
        self._order = prompt_order(len(self.train), config)
        self._mean_norm = 0.0  # of w, over the steps so far
        if self.rival is not None:
            self.rival.begin(self.offline_rewards)

    def step(self, step: int) -> dict[str, float]:
        """Sample, score, estimate, update; returns the step's metrics under a training run's names."""
        began = time.perf_counter()
        rows = self._order[step] if self.rival is None else self.rival.prompts(self._order[step])
        batch = draw([self.train[row] for row in rows], self.policy, self.task, self.config, step)
        batch = replace(batch, prompts=rows)
        prompts = [Prompt(row, str(row), "", (), "", self.config.task) for row in rows]
        history = NO_HISTORY if self._pools is None else self._pools.history(prompts)
        history = replace(history, running_mean_norm=self._mean_norm)
        estimate = self._estimator(batch, history, prompt_seed(call_seed(self.config.seed, step), -1))
        self._split.observe(estimate.stats)
        lr = update(self.policy, self._optimizer, self._schedule, estimate, self.config.optimizer, step)
        active = active_groups(self.config.algo.baseline, batch.rewards)  # the trainer measures no w of the others
        self._mean_norm = running_mean_norm(estimate.weights[active], self._mean_norm)
        scored = Scored(batch.rewards, batch.lengths, failures=0)
        if self._pools is not None:
            self._pools.observe(prompts, scored, estimate.weights, history, estimate.kept)
        if self.rival is not None:
            self.rival.observe(estimate.step, self.policy)
        baseline = {}
        if self.rival is None:
            baseline = step_metrics.of_baseline(
                self.config.algo, scored, estimate.norms_sq, history, weights=estimate.weights
            )
        return {
            **step_metrics.of_rewards(batch.rewards),
            **baseline,
            **step_metrics.of_energies(
                self.config.algo, estimate.coefficients, estimate.weights, history, estimate.kept
            ),
            **({} if self._pools is None else self._pools.metrics()),
            **self._schedule.metrics(),
            **self._split.metrics(),
            "response_length/mean": float(batch.lengths.double().mean()),
            "entropy": estimate.stats.entropy,
            "grad_norm": estimate.stats.sq_norm**0.5,
            "lr": lr,
            "timing_s/step": time.perf_counter() - began,
        }

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracies of the current policy."""
        return evaluate(self.policy, self.task, self.held_out, self.config)

    def offline_rewards(self, count: int) -> Tensor:
        """Training rewards [rows, count] of responses of the current policy to every training prompt."""
        parts = [self.train[at : at + ROWS_AT_ONCE] for at in range(0, len(self.train), ROWS_AT_ONCE)]
        settings = self.config.model_copy(update={"group_size": count})
        drawn = [draw(part, self.policy, self.task, settings, -1 - at) for at, part in enumerate(parts)]
        return torch.cat([batch.rewards for batch in drawn])


def run_toy(config: ToyConfig) -> None:
    """Train, and write RUN_DIR/config.json and RUN_DIR/metrics.jsonl.

    Raises:
        UserError: the config asks for several updates on a batch.
    """
    if config.algo.updates_per_batch > 1:
        raise UserError(
            f"the toy trainer takes one update on a batch, not {config.algo.updates_per_batch}",
            where="algo.updates_per_batch",
            fix="set it to 1, or use the real trainer as backend",
        )
    toy = ToyRun(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(config.run_dir / "config.json", config.model_dump_json(indent=2) + "\n")
    with MetricsWriter(config.run_dir) as metrics:
        metrics.write(0, toy.evaluate())
        for done in range(1, config.num_steps + 1):
            record = toy.step(done - 1)
            if done % config.evaluate_every == 0 or done == config.num_steps:
                record |= toy.evaluate()
            metrics.write(done, record)


def prompt_order(num_rows: int, config: ToyConfig) -> list[list[int]]:
    """Row indices of the Q prompts of every step: shuffled passes over the rows. Only the seed decides the order."""
    generator, order = random.Random(config.seed), list[int]()
    while len(order) < config.num_steps * config.num_prompts:
        rows = list(range(num_rows))
        generator.shuffle(rows)
        order += rows
    size = config.num_prompts
    return [order[step * size : (step + 1) * size] for step in range(config.num_steps)]


def draw(rows: Sequence[Row], policy: ToyPolicy, task: Task, config: ToyConfig, step: int) -> Batch:
    """Sample and score G responses per row."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    asked = [row for row in rows for _ in range(config.group_size)]
    prompts = [policy.encode(row.question) for row in rows]
    samples = policy.sample(prompts, task.max_response_tokens, generator, copies=config.group_size)
    scores = torch.tensor(score_batch(policy, task, asked, samples), dtype=torch.float64)
    return Batch(samples, (task.scale * scores + task.shift).view(len(rows), config.group_size))


def score_batch(policy: ToyPolicy, task: Task, rows: Sequence[Row], samples: Sequence[Drawn]) -> list[float]:
    """The task's reward of each response."""
    pairs = zip(rows, samples, strict=True)
    return [task.reward(policy.decode(sample.tokens), row.answer) for row, sample in pairs]


def evaluate(policy: ToyPolicy, task: Task, rows: Sequence[Row], config: ToyConfig) -> dict[str, float]:
    """Share of responses with reward 1 on held-out rows: greedy, and sampled at the training temperature.

    pass_at_k is the share of the rows with at least one right response among the k sampled.
    """
    generator, k = torch.Generator().manual_seed(EVALUATION_SEED), config.evaluation_samples
    prompts, found = [policy.encode(row.question) for row in rows], {}
    for name, copies, source in (("accuracy", 1, None), ("mean_at_k", k, generator)):
        samples = policy.sample(prompts, task.max_response_tokens, source, copies=copies)
        asked = [row for row in rows for _ in range(copies)]
        right = [value == 1.0 for value in score_batch(policy, task, asked, samples)]
        found[f"eval/{task.name}/{name}"] = sum(right) / len(right)
    solved = sum(any(right[at : at + k]) for at in range(0, len(right), k))
    return found | {f"eval/{task.name}/pass_at_k": solved / len(rows)}


def make_optimizer(policy: ToyPolicy, options: OptimizerConfig) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, or SGD, with megatron-core's update rules."""
    if options.name == "sgd":
        return torch.optim.SGD(
            policy.parameters, lr=options.lr, momentum=options.sgd_momentum, weight_decay=options.weight_decay
        )
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(
        policy.parameters, lr=options.lr, betas=betas, eps=options.adam_eps, weight_decay=options.weight_decay
    )


def update(
    policy: ToyPolicy,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    estimate: Estimate,
    options: OptimizerConfig,
    step: int,
) -> float:
    """Clip, step at the schedule's rate, then pass the statistics to the schedule; returns the rate."""
    lr, norm = schedule.rate(step), estimate.stats.sq_norm**0.5
    if norm:
        factor = min(1.0, options.clip_grad / norm) if options.clip_grad else 1.0
        policy.set_gradient(-factor * estimate.gradient)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    schedule.observe(estimate.stats)
    return lr
