"""The plan of a study of learning curves: a TOML file that says which arms meet on which tasks. Imports no torch.

    tasks = ["sums"]
    seeds = 5
    num_steps = 100
    learning_rates = [3e-4, 1e-3, 3e-3]
    reference = "oblr_po"

    [arms.oblr_po]
    algo.preset = "oblr_po"

    [arms.rloo]
    peer = true
    algo.preset = "rloo"

An arm's settings are those of [defaults], over them its preset's, over them its own.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from oblr_megatron.config import OptimizerConfig, validated
from oblr_megatron.config.algo import PRESETS, AlgoConfig
from oblr_megatron.config.section import Section
from oblr_megatron.errors import UserError

Backend = Literal["toy", "train", "trl_grpo", "trl_rloo"]
CONTROLS = ("shuffled", "matched_decay")  # schedules that take another run's rates


def nested(table: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables.

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
    """Two tables as one; `over` wins.

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
    """5 -> (0, 1, 2, 3, 4): so many seeds."""
    return tuple(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_written(rates: Any) -> Any:
    """Rates as far as the names of directories tell them apart: six digits."""
    return tuple(float(f"{rate:g}") for rate in rates) if isinstance(rates, (list, tuple)) else rates


Seeds = Annotated[tuple[int, ...], BeforeValidator(_counted), Field(min_length=1)]
Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_as_written), Field(min_length=1)]


class Overrides(Section):
    """Settings of the algorithm and of the optimizer, by the names that a run's config has for them."""

    algo: dict[str, Any] = Field({})
    """Keys of [algo], nested or dotted."""
    optimizer: dict[str, Any] = Field({})
    """Keys of [optimizer] but lr, which the sweep sets."""

    @model_validator(mode="before")
    @classmethod
    def _undotted(cls, given: Any) -> Any:
        """{"algo.snr.horizon": 9} -> {"algo": {"snr": {"horizon": 9}}}."""
        return nested(given) if isinstance(given, dict) else given


class Arm(Overrides):
    """One contestant."""

    backend: Backend = "toy"
    """What runs it: "toy": one process (toy_trainer.py); "train", megatron-core and vLLM; "grpo", "rloo": TRL."""
    peer: bool = False
    """A published method: the best of these on each task is what all arms are compared with as well."""
    rates_of: str = ""
    """The arm whose rates a control ("shuffled", "matched_decay") takes: of the same task, seed and learning rate."""
    sweep: bool = True
    """false: no sweep of its own, the rate chosen for the arm that rates_of names."""
    learning_rates: Rates | None = None
    """A sweep grid of its own; by default the plan's."""


class Plan(Section):
    """A whole study; every arm gets the same samples and as careful a sweep."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks (study/tasks)."""
    skill: Literal["low", "middle", "high"] = "middle"
    """How much the warm start already knows."""
    seeds: Seeds = (0, 1, 2, 3, 4)
    """Seeds of the runs that are compared: a list, or a count from 0."""
    sweep_seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1000, 1001)
    """Seeds of the sweep; none of the others, so that no run is compared that its own rate was chosen by."""
    num_steps: int = Field(ge=1)
    """Optimizer steps of a run."""
    num_prompts: int = Field(16, ge=1)
    """Q, prompts a step."""
    group_size: int = Field(8, ge=1)
    """G, responses a prompt."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature."""
    evaluate_every: int = Field(ge=1)
    """Steps between two points of a curve."""
    learning_rates: Rates
    """The sweep's grid, for all arms."""
    grid_extensions: int = Field(2, ge=0)
    """How often a grid grows by one step of its ratio where its best rate lies on the edge."""
    reference: str
    """The arm that all others are paired with."""
    defaults: Overrides = Overrides()
    """Under the settings of every arm."""
    arms: dict[str, Arm] = Field(min_length=1)
    """By name."""

    @field_validator("tasks", "seeds", "sweep_seeds", "learning_rates")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("an entry occurs twice")
        return values

    def grid(self, arm: str) -> tuple[float, ...]:
        """The rates the arm's sweep begins with, rising."""
        return tuple(sorted(self.arms[arm].learning_rates or self.learning_rates))

    def swept(self, arm: str) -> bool:
        """Whether the arm has a sweep: there is a choice, and it is its own."""
        return self.arms[arm].sweep and len(self.grid(arm)) > 1

    def algo(self, arm: str) -> dict[str, Any]:
        """The arm's [algo]: defaults < preset < its own."""
        own = self.arms[arm].algo
        preset = own.get("preset") or self.defaults.algo.get("preset") or ""
        return merged(merged(self.defaults.algo, PRESETS.get(preset, {})), own)

    def optimizer(self, arm: str) -> dict[str, Any]:
        """The arm's [optimizer], without lr."""
        return merged(self.defaults.optimizer, self.arms[arm].optimizer)

    def only(self, arms: list[str]) -> Plan:
        """The plan of some arms, and of those whose rates they take.

        Raises:
            UserError: an arm is unknown.
        """
        for arm in arms:
            if arm not in self.arms:
                raise UserError(f"unknown arm {arm!r}", where="--only", fix=f"name one of {', '.join(self.arms)}")
        kept = {*arms, *(self.arms[arm].rates_of for arm in arms)}
        return self.model_copy(update={"arms": {name: arm for name, arm in self.arms.items() if name in kept}})


def load_plan(path: Path) -> Plan:
    """Read and check.

    Raises:
        UserError: the file cannot be read, or the first thing that is wrong in it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read the plan: {error.strerror}"
        raise UserError(what, where=str(path), fix="give an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not a TOML file: {error}", where=str(path), fix="correct the line named") from error
    plan = validated(Plan, table, str(path))
    _check(plan, str(path))
    return plan


def _check(plan: Plan, where: str) -> None:
    """What holds between keys."""
    both = sorted(set(plan.seeds) & set(plan.sweep_seeds))
    if both:
        raise UserError(
            f"seed {both[0]} is in seeds and in sweep_seeds: its runs would choose the rate they are judged at",
            where=where,
            fix="make the two lists disjoint",
        )
    if plan.reference not in plan.arms:
        fix = f"name one of {', '.join(plan.arms)}"
        raise UserError(f"reference {plan.reference!r} is no arm", where=where, fix=fix)
    if plan.num_steps % plan.evaluate_every:
        raise UserError(
            f"num_steps {plan.num_steps} is not a multiple of evaluate_every {plan.evaluate_every}",
            where=where,
            fix="change one of them: a curve's points are evenly spaced",
        )
    for name in plan.arms:
        _check_arm(plan, name, f"{where}: arms.{name}")


def _check_arm(plan: Plan, name: str, where: str) -> None:
    """Its settings are those of a run, and what a control depends on is there."""
    arm = plan.arms[name]
    for key, section in (("optimizer.lr", plan.optimizer(name)), ("algo.schedule_from", plan.algo(name))):
        if key.rpartition(".")[2] in section:
            fix = "leave it out: learning_rates and rates_of say it"
            raise UserError(f"{key} is not the arm's to set", where=where, fix=fix)
    algo = validated(AlgoConfig, plan.algo(name), f"{where}.algo")
    validated(OptimizerConfig, plan.optimizer(name), f"{where}.optimizer")
    if plan.num_prompts % algo.snr.num_folds:
        what = f"num_prompts {plan.num_prompts} is not a multiple of algo.snr.num_folds {algo.snr.num_folds}"
        raise UserError(what, where=where, fix="change one of them: folds are of whole prompts and of equal size")
    if (algo.schedule in CONTROLS) != bool(arm.rates_of):
        raise UserError(
            f"algo.schedule {algo.schedule!r} with rates_of {arm.rates_of!r}",
            where=where,
            fix=f"the schedules {' and '.join(CONTROLS)} need an arm to take rates from, and no other does",
        )
    if arm.rates_of and (arm.rates_of not in plan.arms or plan.arms[arm.rates_of].rates_of):
        what = f"rates_of {arm.rates_of!r} is no arm that sets its own rates"
        raise UserError(what, where=where, fix="name an arm without rates_of")
    if not arm.sweep and not arm.rates_of:
        raise UserError("sweep = false without rates_of", where=where, fix="give learning_rates = [RATE] instead")
