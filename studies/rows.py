"""Finished runs as lines of DIR/rows.jsonl, small enough for a repository.

A clone has no run directories. The study makes them again from the lines, and continues where the file ends. There
are two kinds of lines: settings (all but the run's key), each before its first run, and runs with their curves.

    {"settings": "1f0c4a", "backend": "toy", "config": {...}, "machine": "...", "versions": {...}}
    {"task": "sums", "arm": "tempered", "cell": "64x1/lr0.001", "seed": 100, "made": "1f0c4a", "start": "7d21e0",
     "date": "2026-11-28", "curve": {"step": [0, 8, ...], ...}, "costs": {"timing_s/step": 0.1, ...}}

A setting that did not exist when the run was made has today's default, which must therefore change nothing. Settings
hold the machine and the libraries' versions, too, since 2026-11-29. `start` is a digest of the weights that the run
began with, and of a recipe's rows. Other processors make others (start.py), so that the repository holds the weights of
generated tasks: runs from two starts are not comparable.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS_FILE, write_whole
from studies.plan import Plan, merged
from studies.recipe import START_FILE
from studies.results import ASKED_FILE, Key, Result, asked_of, keys_on_disk, metrics_dir, read_result
from studies.summary import environment
from studies.sweep import Cell

ROWS_FILE = "rows.jsonl"
OF_THE_KEY = {"task", "seed", "num_prompts", "group_size", "start_dir", "run_dir"}
DIGITS = 6  # significant, of every number


def keep(key: Key, out: Path) -> None:
    """Append the line of a run that has ended; nothing if it is incomplete."""
    result, asked = read_result(key, out), asked_of(key.run_dir(out))
    if result is None or asked is None:
        return
    settings = {"backend": asked["backend"], "config": _beyond_key(asked["config"]), **_where()}
    made = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    row = {
        "task": key.task,
        "arm": key.arm,
        "cell": str(key.cell),
        "seed": key.seed,
        "made": made,
        "start": start_digest(Path(asked["config"]["start_dir"])),
        "date": datetime.now(UTC).date().isoformat(),
        "curve": _curve(result),
        "costs": {name: _short(value) for name, value in result.costs.items() if not math.isnan(value)},
    }
    path, lines = out / ROWS_FILE, [row]
    if not path.exists() or f'{{"settings": "{made}"' not in path.read_text(encoding="utf-8"):
        lines = [{"settings": made, **settings}, row]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def keep_all(plan: Plan, out: Path) -> int:
    """Append the lines of complete runs that have none, because the study was stopped at their end; their number."""
    path, count = out / ROWS_FILE, 0
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = {(row["task"], row["arm"], row["cell"], row["seed"]) for row in map(json.loads, lines) if "seed" in row}
    for key in keys_on_disk(plan, out):
        if (key.task, key.arm, str(key.cell), key.seed) not in kept and read_result(key, out) is not None:
            keep(key, out)
            count += 1
    return count


def restore(plan: Plan, out: Path) -> int:
    """Make the missing run directories of the file's lines; returns their number. A last line that was cut is skipped.

    Raises:
        UserError: a line is damaged, or has settings that are unknown today.
    """
    path, count, settings = out / ROWS_FILE, 0, dict[str, dict[str, Any]]()
    if not path.exists():
        return 0
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    runs: dict[Key, tuple[int, dict[str, Any]]] = {}
    for number, line in enumerate(lines, 1):
        with _named(path, number):
            row = json.loads(line)
            if "settings" in row:
                settings[row["settings"]] = row
            else:  # a run that was repeated has its last line
                runs[Key(row["task"], row["arm"], Cell.parse(row["cell"]), int(row["seed"]))] = number, row
    for key, (number, row) in runs.items():
        if key.arm in plan.arms and not key.run_dir(out).exists():
            with _named(path, number):
                _write(row, settings[row["made"]], key, out)
            count += 1
    return count


def check_starts(out: Path, starts: Mapping[str, Path]) -> None:
    """Check that the lines' runs began with the weights that further runs will begin with.

    Raises:
        UserError: they did not.
    """
    path = out / ROWS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for row in map(json.loads, lines):
        if row.get("task") in starts and row.get("start") not in ("", None, start_digest(starts[row["task"]])):
            what = f"the finished runs of {row['task']} began with other weights"
            fix = f"restore this directory from where {ROWS_FILE} comes from, or give another --out"
            raise UserError(what, where=str(starts[row["task"]]), fix=fix)


@cache
def start_digest(start: Path) -> str:
    """Digest of a start's weights, and of a recipe's rows; "" without weights."""
    files = sorted((start / "model").glob("*.safetensors"))
    stamp = start / START_FILE
    if files and stamp.exists() and "reward" in json.loads(stamp.read_text(encoding="utf-8")):  # made by recipe.py
        files += sorted(start.glob("*.jsonl")) + sorted(start.glob("*.parquet"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12] if files else ""


def mend(out: Path) -> None:
    """Remove a last line that was cut, so that the next line is not added to it."""
    path = out / ROWS_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else "\n"
    if not text.endswith("\n"):
        write_whole(path, text[: text.rfind("\n") + 1])


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Name the line in an error."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        what = f"not the line of a run: {error!r}".replace("\n", " ")
        raise UserError(
            what, where=f"{path}:{number}", fix="restore the line and that of its settings, or give another --out"
        ) from None


def _where() -> dict[str, Any]:
    """Machine and versions of this run."""
    return {name: value for name, value in environment().items() if name != "date"}


def _beyond_key(config: dict[str, Any]) -> dict[str, Any]:
    """A ToyConfig as JSON without the run's key and paths."""
    found = {name: value for name, value in config.items() if name not in OF_THE_KEY}
    return found | {"optimizer": {name: value for name, value in config["optimizer"].items() if name != "lr"}}


def _curve(result: Result) -> dict[str, list[float | None]]:
    """The result's curves by the names of their metrics."""
    curves = {
        "step": result.steps,
        "mean_at_k": result.accuracy,
        "accuracy": result.greedy,
        "pass_at_k": result.solved,
        "entropy": result.entropy,
    }
    return {name: [_short(value) for value in values.tolist()] for name, values in curves.items()}


def _short(value: float) -> float | None:
    """The number with few digits; None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")


def _write(row: dict[str, Any], settings: dict[str, Any], key: Key, out: Path) -> None:
    """Make a run directory from which `read_result` reads the row's curve."""
    from studies.toy_trainer import ToyConfig

    run_dir, backend = key.run_dir(out), settings["backend"]
    own = {
        "task": key.task,
        "seed": key.seed,
        "num_prompts": key.cell.num_prompts,
        "group_size": key.cell.group_size,
        "start_dir": str(out / "start"),
        "run_dir": str(run_dir),
        "optimizer": {"lr": key.cell.lr},
    }
    config = ToyConfig.model_validate(merged(settings["config"], own))
    records = "".join(json.dumps(record) + "\n" for record in _records(row, config.num_steps))
    asked = json.dumps({"backend": backend, "config": config.model_dump(mode="json")}) + "\n"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    # whole or absent: half a run would change the table
    with tempfile.TemporaryDirectory(dir=run_dir.parent, prefix=".restored-") as made:
        partial = Path(made) / run_dir.name
        metrics_dir(partial, backend).mkdir(parents=True)
        (partial / ASKED_FILE).write_text(asked, encoding="utf-8")
        (metrics_dir(partial, backend) / METRICS_FILE).write_text(records, encoding="utf-8")
        try:
            partial.rename(run_dir)
        except OSError:
            if not run_dir.exists():  # else another summary was faster
                raise


def _records(row: dict[str, Any], num_steps: int) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl. A step's entropy is that of the policy before its update."""
    curve, task = row["curve"], row["task"]
    records: dict[int, dict[str, Any]] = {}
    for place, step in enumerate(map(int, curve["step"])):
        values = {f"eval/{task}/{name}": curve[name][place] for name in ("mean_at_k", "accuracy", "pass_at_k")}
        of_entropy = min(step + 1, num_steps)
        records[step] = records.get(step, {}) | {name: value for name, value in values.items() if value is not None}
        if curve["entropy"][place] is not None:
            records[of_entropy] = records.get(of_entropy, {}) | {"entropy": curve["entropy"][place]}
    return ({"step": step, **records[step], **(row["costs"] if step else {})} for step in sorted(records))
