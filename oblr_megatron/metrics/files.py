"""Writes and reads a run's metrics.jsonl and environment.json.

metrics.jsonl holds one strict JSON object per step, in rising order of `step`, the number of steps done. The
record of step 0 is the evaluation before training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import get_ident
from typing import Any

from oblr_megatron.checks.packages import package_versions
from oblr_megatron.errors import MAY_PASS, UserError
from oblr_megatron.metrics.names import Record, in_table_order

METRICS_FILE = "metrics.jsonl"
RANKS_FILE = "logs/ranks.jsonl"  # written by observe/performance/ranks.py
ENVIRONMENT_FILE = "environment.json"
FIX_LINE = "remove the line or restore the file"

logger = logging.getLogger(__name__)


class KeptLines:
    """Appends lines to a file. While its disk is full or away they stay in memory, and the next write repeats them.

    Args:
        path: of the file.
        prepare: runs before the first line, and again if that failed.
    """

    def __init__(self, path: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self._path, self._prepare, self._prepared = path, prepare, False
        self.waiting, self._told = "", False
        self._whole: int | None = None  # size of the file without half a line that is still to be cut off

    def write(self, lines: str) -> None:
        """Append whole lines, each with its line break; nothing of them stays in a buffer."""
        self.waiting += lines
        try:
            if not self._prepared:
                self._prepare()
                self._prepared = True
            self._append(self.waiting.encode())
            self.waiting = ""
        except OSError as error:
            if error.errno not in MAY_PASS:
                raise
            if not self._told:
                logger.warning("cannot write %s: %s; new lines stay in memory until it can", self._path, error)
            self._told = True

    def _append(self, left: bytes) -> None:
        if self._whole is not None and self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._whole)
                half = file.read(len(left))
            if half and left.startswith(half):  # or somebody has put another file there
                os.truncate(self._path, self._whole)
        self._whole = None
        self._path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleaned up
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab", buffering=0) as file:
                while left:
                    left = left[file.write(left) or 0 :]
        except OSError:
            self._whole = size  # the next line must not continue a cut one
            with suppress(OSError):
                os.truncate(self._path, size)
                self._whole = None
            raise


def step_lines(path: Path, keep_until: int | None) -> KeptLines:
    """Lines of a file with one JSON object a step.

    Args:
        path: of the file.
        keep_until: the last step to keep from an existing file, because the run does later ones again; None: none.
    """

    def prepare() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        last = -1 if keep_until is None else keep_until
        write_whole(path, (text for text, line in intact_lines(path) if line["step"] <= last), synced=True)

    return KeptLines(path, prepare)


class MetricsWriter:
    """Writes every step to RUN_DIR/metrics.jsonl; on ranks other than 0 it writes nothing.

        with MetricsWriter(config.run_dir, rank=parallel.rank, world_size=parallel.world_size) as metrics:
            metrics.write(step, {"reward/mean": 0.53, ...})

    The first write creates the file. So a run that is refused before it changes nothing. Every line is flushed, so that
    a killed run loses nothing. A full disk does not end the run, see `KeptLines`.

    Args:
        run_dir: created if absent.
        rank: of this process.
        world_size: number of ranks, for environment.json.
        resume_step: last step of the resumed checkpoint. Later records are dropped and the file is continued.

    Raises:
        UserError: metrics.jsonl exists and resume_step is None, or at the first write is damaged.
    """

    def __init__(self, run_dir: Path, *, rank: int = 0, world_size: int = 1, resume_step: int | None = None) -> None:
        self._last_step = -1 if resume_step is None else resume_step
        self._lines = KeptLines(run_dir / METRICS_FILE, self._prepare)
        self._run_dir, self._rank, self._world_size, self._resume_step = run_dir, rank, world_size, resume_step
        self._late: Record = {}  # an evaluation of the resumed step
        if rank == 0 and resume_step is None and (run_dir / METRICS_FILE).exists():
            path = str(run_dir / METRICS_FILE)
            raise UserError("the run directory already has metrics", where=path, fix="choose a new run_dir")

    def write(self, step: int, values: Mapping[str, float]) -> Record:
        """Log all metrics of one step, an evaluation's included, and return the record as logged.

        An evaluation of the resumed step joins the record of that step.

        Raises:
            KeyError: a name is not in METRICS.
        """
        late = step == self._resume_step == self._last_step and all(name.startswith("eval/") for name in values)
        assert late or step > self._last_step, f"step {step} was logged after step {self._last_step}"
        self._last_step = step
        record: Record = {"step": step}
        for name in in_table_order(values.keys() - {"step"}):
            record[name] = _finite_or_none(values[name])
        if self._rank == 0:
            self._late |= record if late else {}
            self._lines.write("" if late else _line(record))
        return record

    def _prepare(self) -> None:
        run_dir, resume_step = self._run_dir, self._resume_step
        run_dir.mkdir(parents=True, exist_ok=True)
        _write_environment(run_dir, self._world_size, resume_step)
        kept = logged_until(run_dir, 0 if resume_step is None else resume_step)
        if self._late:  # a new run directory has no record of that step
            own: Record = kept.pop() if kept and kept[-1]["step"] == resume_step else {"step": resume_step}
            whole = own | self._late
            kept.append({name: whole[name] for name in ("step", *in_table_order(whole.keys() - {"step"}))})
        write_whole(run_dir / METRICS_FILE, map(_line, kept), synced=True)

    def close(self) -> None:
        """Write what the disk has refused so far, if it takes it now; may be called twice."""
        if self._lines.waiting:
            self._lines.write("")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite_or_none(value: float) -> float | None:
    """A plain int or float, also from a numpy or torch scalar; None if not finite."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _write_environment(run_dir: Path, world_size: int, resume_step: int | None) -> None:
    """Write the run's start time; first step, ranks, device and versions are those of this attempt."""
    import torch

    path, started = run_dir / ENVIRONMENT_FILE, datetime.now(UTC).isoformat(timespec="seconds")
    if resume_step is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # it is absent or damaged
            started = json.loads(path.read_text(encoding="utf-8"))["started"]
    cpu = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    environment = {
        "started": started,
        "since": max(0, resume_step or 0),  # steps of earlier attempts
        "world_size": world_size,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "versions": {"python": platform.python_version()} | package_versions(),
    }
    write_whole(path, json.dumps(environment, indent=2) + "\n")


def write_whole(path: Path, text: str | Iterable[str], *, synced: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new. A text may come in parts.

    With `synced` that holds after a crash of the machine, too: the content is on the disk before the name.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.new")  # two writers have two drafts
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def intact_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a file with one JSON object a step, as text and read; empty if it is absent.

    Other lines are skipped, such as one cut by a kill.

    One line at a time: ranks.jsonl of 1,024 ranks has 130 kB a step.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(text := line.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield text, record


def read_metrics(run_dir: Path) -> list[Record]:
    """All records of a run, finished or not.

    An incomplete last line is dropped with a warning.

    Raises:
        UserError: there is no metrics.jsonl, or a line is not a record.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("the metrics file does not exist", where=str(path), fix="give the run_dir of a run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the metrics: {error}", where=str(path), fix="give a readable file") from error
    *lines, rest = text.split("\n")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    try:
        return [*records, _parse(rest, str(path))] if rest else records
    except UserError:  # cut by a kill
        logger.warning("%s: dropped the incomplete last line", path)
        return records


def logged_until(run_dir: Path, step: float = math.inf) -> list[Record]:
    """The records of a run up to a step; [] if it has logged none yet. Raises as `read_metrics`."""
    records = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    return [record for record in records if (record["step"] or 0) <= step]


def _parse(line: str, where: str) -> Record:
    """One line as strict JSON; NaN and Infinity, which Python accepts, are refused."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the line is not JSON: {error}", where=where, fix=FIX_LINE) from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError('the line is not an object with an integer "step"', where=where, fix=FIX_LINE)
    wrong = next((name for name, value in record.items() if not (value is None or _is_number(value))), None)
    if wrong is not None:
        raise UserError(f"the value of {wrong!r} is not a number", where=where, fix=FIX_LINE)
    return record


def _is_number(value: object) -> bool:
    """Whether a value fits into fp64."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
