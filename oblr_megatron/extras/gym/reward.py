"""The reward "reasoning_gym": each task's own score, 0 to 1, for rows of the sources "reasoning_gym:NAME".

The text between the last <answer> and </answer> is scored; a response without them scores 0.
"reasoning_gym:whole" scores the whole response, trimmed. The row names its task, so one reward scores a mixture of
tasks.

The package reasoning-gym is imported on first use. This takes two seconds and imports sympy and matplotlib. Ranks
import it to check a source (data/sources.py). Worker processes generate rows (rows.py) and score answers.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from oblr_megatron.checks.packages import REASONING_GYM
from oblr_megatron.config.data import GYM_PREFIX
from oblr_megatron.config.reward import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.processes.pool import Pool
from oblr_megatron.rewards.base import PooledReward, RewardResult, pair, score_answers
from oblr_megatron.types import Prompt, Sample

COLUMN = "reasoning_gym"  # in a generated row; see rows.py
NOT_TASKS = ("composite",)  # it mixes other tasks, as several sources of data.train do
OWN_OPTIONS = ("seed", "size")  # options of every task; keys of a source
MAX_CAUSE = 200  # characters of the package's own message

_FUNCTIONS = frozenset({"C", "E", "pi", "exp", "log", "ln", "sqrt", "cbrt", "Abs", "Rational", "erf", "erfi"}) | {
    f"{inverse}{name}{hyperbolic}"
    for inverse in ("", "a")
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for hyperbolic in ("", "h")
}
EVALUATED = {
    "countdown": frozenset[str](),
    "intermediate_integration": _FUNCTIONS,
    "polynomial_multiplication": _FUNCTIONS,
    "puzzle24": frozenset[str](),
    "simple_integration": _FUNCTIONS,
}
"""Tasks that hand the answer to sympy, which evaluates it as Python; the names that an answer may use.

The variables of the item are allowed as well.
"""
_NAME = re.compile(r"[^\W\d]\w*")
_TEXT = re.compile("""["'`]""")  # sympy evaluates texts too, and escapes hide the names in them
_READ = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules that read an answer in Python's notation for lists with `eval`."""


def check_package(where: str) -> None:
    """Refuse a source or reward if reasoning-gym is not installed, or in a version that is not accepted.

    Raises:
        UserError: see above.
    """
    installed = REASONING_GYM.installed
    if installed is None or not REASONING_GYM.accepts(installed[1]):
        what = f"reasoning-gym {installed[1]} is installed" if installed else "reasoning-gym is not installed"
        what += f", {REASONING_GYM.accepted} is accepted" if installed else ""
        raise UserError(what, where=where, fix="call pip install -e '.[gym]' in the repository")


def make_task(name: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1, where: str = "") -> Any:
    """The package's data set for a task: `size` items, each a function of the seed and its index.

    Args:
        name: of the task, e.g. "gcd".
        options: of the task's config class, e.g. {"max_value": 100}.
        seed: at least 0; seed + size is at most 2^32.
        size: number of items.
        where: for errors.

    Raises:
        UserError: the package is not installed, has no task of this name, or the task refuses its options.
    """
    check_package(where)
    from reasoning_gym.factory import DATASETS

    names = sorted(DATASETS.keys() - set(NOT_TASKS))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or [one for one in names if name and name in one]
        fix = f"use {' or '.join(near[:3])}" if near else f"use one of {', '.join(names)}"
        raise UserError(f"reasoning-gym has no task {name!r}", where=where, fix=fix)
    task, config = DATASETS[name]
    known = {field.name: field.default for field in fields(config) if field.name not in OWN_OPTIONS}
    if unknown := sorted(options.keys() - known.keys()):
        fix = f"use {', '.join(known)}" if known else "leave options out"
        raise UserError(f"the task {name!r} has no option {unknown[0]!r}", where=where, fix=fix)
    try:
        return task(config=config(**options, seed=seed, size=size))
    except Exception as error:  # the package checks by asserts, and wrong types raise what they happen to
        shown = ", ".join(f"{key} = {value!r}" for key, value in known.items() if value is not MISSING)
        raise UserError(
            f"the task {name!r} refuses its options: {cause_of(error)}",
            where=where,
            fix=f"correct them; the defaults are {shown}" if shown else "correct them",
        ) from error


def cause_of(error: BaseException) -> str:
    """Class and message of an error, in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_CAUSE]


def extracted(response: str) -> str | None:
    """The text between the last <answer> that is closed and its </answer>, trimmed; None without one.

    As the package's `extract_answer`, which begins at an earlier <answer> that was left open.

    Example: "it wants <answer> tags: <answer> 4 </answer>" -> "4"
    """
    pieces = [piece.rpartition("<answer>") for piece in response.split("</answer>")[:-1]]
    return next((answer.strip() for _, mark, answer in reversed(pieces) if mark), None)


def whole(response: str) -> str | None:
    """The response, trimmed; None if nothing is left."""
    return response.strip() or None


class GymReward(PooledReward):
    """Scores a batch; identical answers to the same question are scored once."""

    def __init__(self, name: str, config: RewardConfig) -> None:
        """`name` is "reasoning_gym" or "reasoning_gym:whole"."""
        target, prepare = f"{__name__}:score", f"{__name__}:warm_up"
        pool = Pool(target, num_workers=config.num_workers, deadline_s=config.timeout_s, prepare=prepare)
        super().__init__(pool)
        self._extract = whole if name.endswith(":whole") else extracted

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        """The tasks' scores; see `Reward.score`."""
        asked = [(self._extract(sample.text), (prompt.columns,)) for prompt, sample in pair(prompts, samples)]
        return score_answers(asked, self.pool.map)


def score(answer: str, row: Mapping[str, Any]) -> float:
    """The task's own score of an answer, 0 to 1. Runs in the worker processes.

    An answer on which the task raises scores 0: some raise on a text that they cannot parse.

    Raises:
        ValueError: the row is not one of a reasoning_gym source.
    """
    if COLUMN not in row:
        raise ValueError(f"the row has no column {COLUMN!r}: its source is not {GYM_PREFIX}NAME")
    item = row[COLUMN]
    task, entry = _scorer(item["name"], repr(item["options"])), ast.literal_eval(item["entry"])
    if item["name"] in EVALUATED and not _is_formula(answer, EVALUATED[item["name"]], entry["metadata"]):
        return 0.0
    try:
        return float(task.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  of any class, by task
        return 0.0


def _is_formula(answer: str, known: frozenset[str], metadata: Mapping[str, Any]) -> bool:
    """Whether an answer holds no text and only known names. So it cannot reach Python's builtins, such as `eval`."""
    variables = {*metadata.get("variables", ()), metadata.get("variable")}
    return _TEXT.search(answer) is None and all(name in known or name in variables for name in _NAME.findall(answer))


@lru_cache(maxsize=64)
def _scorer(name: str, options: str) -> Any:
    return make_task(name, ast.literal_eval(options), where=f"{GYM_PREFIX}{name}")


def warm_up() -> None:
    """Import the package, once for all workers. Answers are data there: `eval` reads literals only."""
    import reasoning_gym  # noqa: F401

    for module in _READ:
        sys.modules[f"reasoning_gym.{module}"].__dict__["eval"] = ast.literal_eval
