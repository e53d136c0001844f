"""Tasks that are the config file of a training run: its model, rows, template, lengths and reward. Imports no torch.

A plan names them in [recipes]. The study copies model and rows to OUT/start/TASK. It sets steps, shape, rate, algorithm
and evaluation itself. A reward in a file stays where it is, relative to the current directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.config import parse_config
from oblr_megatron.config.run import read_table
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import write_whole
from studies.plan import merged

if TYPE_CHECKING:
    from oblr_megatron.config.data import SourceConfig

START_FILE = "start.json"
MODEL = "model"
ROW_FILES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe and the files to copy. Example: Recipe(table={...}, files={"model": Path("run/x/model")})"""

    table: dict[str, Any]  # settings of the run; files have their names below the start
    files: dict[str, Path]  # name below the start -> original


@cache
def read_recipe(task: str, path: Path) -> Recipe:
    """Read the config of a task.

    Raises:
        UserError: the file is not a config of a run with one held-out set and equally many samples in every step.
    """
    table = read_table(path)
    config = parse_config(table, str(path))
    files, held_out = {MODEL: Path(config.model.path)}, list(config.evaluate.data.values())
    if len(held_out) != 1:
        what = f"evaluate.data has {len(held_out)} sets, and a learning curve is of one"
        raise UserError(what, where=str(path), fix="name one held-out set")

    if config.rollout.dynamic_sampling:
        what = "rollout.dynamic_sampling draws a number of samples that a curve over samples does not count"
        raise UserError(what, where=str(path), fix="leave it out")

    def moved(sources: list[SourceConfig], name: str) -> Iterator[dict[str, Any]]:
        for number, source in enumerate(sources):
            own = source.model_dump(mode="json", exclude_defaults=True)
            if Path(source.path).suffix in ROW_FILES:
                own["path"] = f"{name}{number or ''}{Path(source.path).suffix}"
                files[own["path"]] = Path(source.path)
            yield own

    train, (tested,) = list(moved(list(config.data.train), "train")), moved(held_out, "heldout")
    table = merged(table, {"model": {"path": MODEL}, "data": {"train": train}})
    return Recipe({**table, "evaluate": {**table["evaluate"], "data": {task: tested}}}, files)


def prepare_recipe(task: str, path: Path, directory: Path) -> Path:
    """Return DIRECTORY/TASK; copy the recipe's model and rows to it unless it is complete.

    Raises:
        UserError: see `read_recipe`; or the model is missing, or the directory holds another recipe or other rows.
    """
    recipe, target = read_recipe(task, path), directory / task
    stamp = target / START_FILE
    if stamp.exists():
        changed = [] if json.loads(stamp.read_text(encoding="utf-8")) == recipe.table else [path]
        rows = {name: source for name, source in recipe.files.items() if name != MODEL and source.exists()}
        changed += [source for name, source in rows.items() if source.read_bytes() != (target / name).read_bytes()]
        if changed:
            raise UserError(f"{changed[0]} has changed", where=str(target), fix="restore it, or give another --out")
        return target
    for source in recipe.files.values():
        if not source.exists():
            what = f"the recipe names {source}, which is missing"
            raise UserError(what, where=str(path), fix="make it as the head of the file says")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name, source in recipe.files.items():
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target / name)
    write_whole(stamp, json.dumps(recipe.table, indent=2) + "\n")
    return target


def recipe_table(table: dict[str, Any], start: Path) -> dict[str, Any]:
    """The recipe's settings with the paths of its copies. A run saves no checkpoint and exports no weights."""

    def placed(source: dict[str, Any]) -> dict[str, Any]:
        copied = Path(source["path"]).suffix in ROW_FILES
        return {**source, "path": str(start / source["path"])} if copied else source

    data = {task: placed(source) for task, source in table["evaluate"]["data"].items()}
    return merged(
        table,
        {
            "model": {"path": str(start / MODEL)},
            "data": {"train": [placed(source) for source in table["data"]["train"]]},
            "evaluate": {"data": data},
            "checkpoint": {"every_steps": 0, "export_hf": False},
        },
    )
