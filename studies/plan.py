"""Read the plan of a study of learning curves: a TOML file that lists tasks, seeds and arms. Imports no torch.

    tasks = ["sums"]
    shapes = ["8x8", "32x2"]
    seeds = 5
    num_steps = 100
    learning_rates = [3e-4, 1e-3, 3e-3]
    reference = "oblr_po"

    [arms.oblr_po]
    algo.preset = "oblr_po"

    [arms.rloo]
    peer = true
    algo.preset = "rloo"

An arm's own settings override its preset's, which override [defaults].
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from oblr_megatron.config import OptimizerConfig, validated
from oblr_megatron.config.algo import PRESETS, AlgoConfig
from oblr_megatron.config.section import Section
from oblr_megatron.errors import UserError

Backend = Literal["toy", "train", "trl_grpo", "trl_rloo"]


def nested(table: dict[str, Any]) -> dict[str, Any]:
    """Expand dotted keys into tables.

    >>> nested({"a.b": 1, "a": {"c": 2}})
    {'a': {'b': 1, 'c': 2}}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        first, _, rest = key.partition(".")
        inner = nested({rest: value}) if rest else nested(value) if isinstance(value, dict) else value
        found = merged(found, {first: inner})
    return found


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables; `over` wins.

    >>> merged({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})
    {'a': 1, 'b': {'c': 2, 'd': 3}}
    """
    both = {
        key: merged(under[key], value) if isinstance(value, dict) and isinstance(under[key], dict) else value
        for key, value in over.items()
        if key in under
    }
    return {**under, **over, **both}


def _counted(value: Any) -> Any:
    """A count of seeds as seeds. Example: 5 -> (0, 1, 2, 3, 4)."""
    return tuple(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_written(rates: Any) -> Any:
    """Round rates to the six digits that directory names show."""
    return tuple(float(f"{rate:g}") for rate in rates) if isinstance(rates, (list, tuple)) else rates


def _pair(shape: Any) -> Any:
    """A shape as written, e.g. "8x8", as (8, 8)."""
    parts = shape.split("x") if isinstance(shape, str) else ()
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else shape


Count = Annotated[int, Field(ge=1)]
Shapes = Annotated[tuple[Annotated[tuple[Count, Count], BeforeValidator(_pair)], ...], Field(min_length=1)]
Seeds = Annotated[tuple[int, ...], BeforeValidator(_counted), Field(min_length=1)]
Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_as_written), Field(min_length=1)]


class Overrides(Section):
    """Settings of the algorithm and the optimizer, under the key names of a run's config."""

    algo: dict[str, Any] = Field({})
    """Keys of [algo], nested or dotted."""
    optimizer: dict[str, Any] = Field({})
    """Keys of [optimizer] except lr, which the sweep sets."""

    @model_validator(mode="before")
    @classmethod
    def _undotted(cls, given: Any) -> Any:
        """{"algo.snr.horizon": 9} -> {"algo": {"snr": {"horizon": 9}}}."""
        return nested(given) if isinstance(given, dict) else given


class Arm(Overrides):
    """One method of the comparison."""

    backend: Backend = "toy"
    """"toy": one process (toy_trainer.py); "train": megatron-core and vLLM; "trl_grpo", "trl_rloo": TRL."""
    tasks: tuple[str, ...] = ()
    """Tasks of this arm; by default all of the plan's."""
    peer: bool = False
    """A published method. All arms are also compared with the best peer of each task."""
    learning_rates: Rates | None = None
    """Sweep grid of this arm; by default the plan's."""
    shapes: Shapes | None = None
    """Shapes of this arm; by default the plan's."""
    model: dict[str, Any] = Field({})
    """Keys of [model] of a recipe, e.g. lora.rank = 16. Backend "train" only."""
    more_samples: int = Field(1, ge=1)
    """Above 1: a positive control. Its steps have this many times the samples of the other arms' steps."""
    norm_source: Literal["exact", "logit", "length"] = "exact"
    """What baselines read as w, as gradnorm.source of a training run."""
    rival: Literal["none", "otb", "opob", "dbb", "spo", "vl_norm", "advantage_reweighting"] = "none"
    """A published method in place of algo.baseline, which must then be "none" (rivals.py). Backend "toy" only."""


class Plan(Section):
    """A whole study. Every arm gets the same number of samples and a sweep of its shape (Q, G) and learning rate."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks (studies/tasks), and of recipes."""
    recipes: dict[str, Path] = Field({})
    """Tasks that are the config of a training run: name -> file, relative to the current directory. No backend "toy"
    trains them. The file's own steps, shape, algorithm, optimizer and checkpoints are not used."""
    model: dict[str, Any] = Field({})
    """Keys of [model] of every recipe, e.g. dtype = "float32"; an arm's come over them."""
    skill: Literal["low", "middle", "high"] = "middle"
    """Skill of the warm-started model."""
    start_seed: int = 0
    """Seed of that model, which all runs of a task begin with: its first weights, and what it saw."""
    seeds: Seeds = (0, 1, 2, 3, 4)
    """Seeds of the compared runs: a list, or a count from 0."""
    sweep_seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1000, 1001)
    """Seeds of the sweep. They must differ from `seeds`, so that no compared run also chose the rate."""
    num_steps: int = Field(ge=1)
    """Optimizer steps of a run."""
    train_rows: int | None = Field(None, ge=1)
    """Runs see only so many of a task's training questions, and come back to them. Backend "toy" only."""
    shapes: Shapes = ((16, 8),)
    """Prompts a step and responses per prompt, as "QxG". The sweep tries every shape; all have the same Q G."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature."""
    evaluate_every: int = Field(ge=1)
    """Steps between two points of a curve."""
    evaluation_samples: int = Field(4, ge=1)
    """Sampled responses per held-out question, besides the greedy one."""
    learning_rates: Rates
    """Sweep grid of all arms."""
    grid_extensions: int = Field(2, ge=0)
    """Largest number of rates that the sweep adds to a grid while its best rate lies on the edge."""
    grid_refinements: int = Field(0, ge=0)
    """Rounds that add rates next to the best one, at an arm's best shape."""
    target_share: float = Field(0.8, gt=0, le=1)
    """The target of a task: this share of the way from the accuracy at the start to the best final accuracy of an
    arm."""
    reference: str
    """The arm that every other arm is compared with, seed by seed."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of arms that get an own table over the tasks, as the reference and the best peer have it."""
    defaults: Overrides = Overrides()
    """Settings of every arm, unless the arm or its preset overrides them."""
    arms: dict[str, Arm] = Field(min_length=1)
    """Arms by name."""

    @property
    def samples_per_step(self) -> int:
        """Q G, the same for all arms but positive controls."""
        num_prompts, group_size = self.shapes[0]
        return num_prompts * group_size

    @field_validator("tasks", "seeds", "sweep_seeds", "learning_rates", "shapes")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("an entry occurs twice")
        return values

    def grid(self, arm: str) -> tuple[float, ...]:
        """The arm's sweep grid before extensions, ascending."""
        return tuple(sorted(self.arms[arm].learning_rates or self.learning_rates))

    def shapes_of(self, arm: str) -> tuple[tuple[int, int], ...]:
        """The arm's shapes (Q, G)."""
        return self.arms[arm].shapes or self.shapes

    def arms_on(self, task: str) -> list[str]:
        """Names of the arms that run on a task."""
        return [name for name, arm in self.arms.items() if not arm.tasks or task in arm.tasks]

    def swept(self, arm: str) -> bool:
        """Whether the arm has more than one cell, so that a sweep chooses."""
        return len(self.grid(arm)) * len(self.shapes_of(arm)) > 1

    def fewest_runs(self) -> int:
        """Runs of the whole study, if no sweep adds rates to its grid."""
        arms = [arm for task in self.tasks for arm in self.arms_on(task)]
        cells = sum(len(self.grid(arm)) * len(self.shapes_of(arm)) for arm in arms if self.swept(arm))
        return cells * len(self.sweep_seeds) + len(arms) * len(self.seeds)

    def algo(self, arm: str) -> dict[str, Any]:
        """The arm's [algo]: its own keys over its preset's over the defaults."""
        own = self.arms[arm].algo
        preset = own.get("preset") or self.defaults.algo.get("preset") or ""
        return merged(merged(self.defaults.algo, PRESETS.get(preset, {})), own)

    def optimizer(self, arm: str) -> dict[str, Any]:
        """The arm's [optimizer], without lr."""
        return merged(self.defaults.optimizer, self.arms[arm].optimizer)

    def compared_with(self, arm: str | None) -> Plan:
        """The plan with another reference; the same for None.

        Raises:
            UserError: the arm is unknown.
        """
        if arm is not None and arm not in self.arms:
            raise UserError(f"unknown arm {arm!r}", where="--reference", fix=f"name one of {', '.join(self.arms)}")
        return self.model_copy(update={"reference": arm or self.reference})

    def only(self, arms: Sequence[str] = (), tasks: Sequence[str] = ()) -> Plan:
        """The plan restricted to some arms and tasks; empty: all.

        Raises:
            UserError: an arm or a task is unknown.
        """
        for option, named, known in (("--only", arms, list(self.arms)), ("--tasks", tasks, self.tasks)):
            if unknown := [name for name in named if name not in known]:
                what = f"the plan has no {unknown[0]!r}"
                raise UserError(what, where=option, fix=f"name one of {', '.join(known)}")
        chosen = {name: arm for name, arm in self.arms.items() if not arms or name in arms}
        return self.model_copy(
            update={"arms": chosen, "tasks": tuple(task for task in self.tasks if not tasks or task in tasks)}
        )


def load_plan(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        UserError: the file cannot be read, or has a mistake.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read the plan: {error.strerror}"
        raise UserError(what, where=str(path), fix="give an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not a TOML file: {error}", where=str(path), fix="correct that line") from error
    plan = validated(Plan, table, str(path))
    _check(plan, str(path))
    return plan


def _check(plan: Plan, where: str) -> None:
    """Check conditions between keys."""
    both = sorted(set(plan.seeds) & set(plan.sweep_seeds))
    if both:
        raise UserError(
            f"seed {both[0]} is in seeds and in sweep_seeds",
            where=where,
            fix="make the two lists disjoint, so that no compared run also chose the rate",
        )
    if plan.reference not in plan.arms:
        fix = f"name one of {', '.join(plan.arms)}"
        raise UserError(f"reference {plan.reference!r} is not an arm", where=where, fix=fix)
    for name in (name for pair in plan.pairs for name in pair if name not in plan.arms):
        fix = f"name one of {', '.join(plan.arms)}"
        raise UserError(f"{name!r} in pairs is not an arm", where=where, fix=fix)
    if plan.num_steps % plan.evaluate_every:
        raise UserError(
            f"num_steps {plan.num_steps} is not a multiple of evaluate_every {plan.evaluate_every}",
            where=where,
            fix="change one of them, so that a curve's points are evenly spaced",
        )
    for name in sorted(plan.recipes.keys() - set(plan.tasks)):
        raise UserError(f"recipe {name!r} is not a task of the plan", where=where, fix="add it to the plan's tasks")
    if plan.model and not plan.recipes:
        raise UserError(f"model {plan.model} without a recipe", where=where, fix="add [recipes], or leave model out")
    for name, arm in plan.arms.items():
        _check_arm(plan, name, f"{where}: arms.{name}")
        if plan.train_rows and arm.backend != "toy":
            what, fix = f"train_rows with backend {arm.backend!r}", 'set backend to "toy", or leave train_rows out'
            raise UserError(what, where=f"{where}: arms.{name}", fix=fix)
        if arm.model and not (arm.backend == "train" and plan.recipes.keys() >= set(arm.tasks or plan.tasks)):
            what = f"model {arm.model} with backend {arm.backend!r}, or of a task that is no recipe"
            fix = 'set backend to "train" and tasks to recipes, or leave model out'
            raise UserError(what, where=f"{where}: arms.{name}", fix=fix)


def _check_arm(plan: Plan, name: str, where: str) -> None:
    """Check that the arm's settings are valid."""
    arm = plan.arms[name]
    for task in arm.tasks:
        if task not in plan.tasks:
            raise UserError(f"task {task!r} is not a task of the plan", where=where, fix="add it to the plan's tasks")
    recipes = [task for task in plan.tasks if task in plan.recipes and name in plan.arms_on(task)]
    if recipes and arm.backend == "toy":
        what = f"backend 'toy' cannot train the recipe {recipes[0]!r}"
        raise UserError(what, where=where, fix='set backend to "train", "trl_grpo" or "trl_rloo"')
    if "lr" in plan.optimizer(name):
        raise UserError("an arm cannot set optimizer.lr", where=where, fix="remove it and use learning_rates")
    algo = validated(AlgoConfig, plan.algo(name), f"{where}.algo")
    validated(OptimizerConfig, plan.optimizer(name), f"{where}.optimizer")
    for num_prompts, group_size in plan.shapes_of(name):
        shape, samples = f"{num_prompts}x{group_size}", arm.more_samples * plan.samples_per_step
        if num_prompts % algo.snr.num_folds:
            what = f"shape {shape}: {num_prompts} prompts are not a multiple of algo.snr.num_folds {algo.snr.num_folds}"
            raise UserError(what, where=where, fix="change one of them, so that folds hold whole prompts")
        if num_prompts * group_size != samples:
            what = f"shape {shape} has {num_prompts * group_size} samples a step instead of {samples}"
            raise UserError(what, where=where, fix="give every arm the same samples, or set more_samples for a control")
    if arm.rival != "none" and (arm.backend != "toy" or algo.baseline != "none"):
        what = f"rival {arm.rival!r} with backend {arm.backend!r} and algo.baseline {algo.baseline!r}"
        raise UserError(what, where=where, fix='set backend to "toy" and algo.baseline to "none"')
