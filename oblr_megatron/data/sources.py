"""A configured source -> its records in order, each with its file and row number.

JSONL has its own line reader, so that a malformed line costs only that line; the JSON loader of `datasets` would refuse
the whole file. Parquet files are read by pyarrow. Directories and hub data sets go through `datasets`, which streams
local files without a copy in its cache. Tasks of reasoning-gym are generated (extras/gym/).
"""

from __future__ import annotations

import errno
import json
import logging
import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oblr_megatron.checks.git_lfs import refuse_pointer
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.config.run import validated
from oblr_megatron.data.conventions import CONVENTIONS, GENERATED, PLAIN, Convention
from oblr_megatron.errors import UserError
from oblr_megatron.extension import extension
from oblr_megatron.formatting import searched_from

if TYPE_CHECKING:
    from oblr_megatron.config import Config

GYM = "data reasoning_gym"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".arrow", ".txt", ".gz")
_NOT_READ = (".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip")
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # written by Dataset.save_to_disk
BATCH_ROWS = 1024  # rows per read
_REPEATED = ("huggingface_hub.utils._http", "datasets.packaged_modules.parquet.parquet")
"""Loggers of failed requests and damaged files. Our own error says the same once."""
ONE_PER_LINE = "write one JSON object per line, instead of one array"
NOT_JSON = "not JSON"
LONE_BACKSLASH = "not JSON: a backslash that is not doubled"
_CANNOT = "cannot read the data set"


class Record(NamedTuple):
    """One stored row. Example: Record("train", 3, {"question": "2+3?", "answer": "5"}, "gsm8k/train.jsonl")"""

    file: str  # name without suffix, or name of the hub data set
    number: int  # line or row in the file, from 0
    value: dict[str, Any] | str  # the columns, or the reason why the row cannot be read
    path: str = ""  # the file or directory, or the path as configured


def named_source(text: str) -> tuple[str, SourceConfig]:
    """Name and source of a command-line argument.

    Args:
        text: "NAME=PATH", a path, a hub data set, a convention, or "reasoning_gym:TASK". A convention called NAME
            applies to PATH. The default NAME is the stem of a file or directory, the last part of a hub name, or TASK.

    Examples:
        "gsm8k=data/test.jsonl" -> "gsm8k", SourceConfig(path="data/test.jsonl", convention="gsm8k")
        "data/sums.jsonl"       -> "sums", SourceConfig(path="data/sums.jsonl")
        "aime24"                -> "aime24", SourceConfig(path="aime24", convention="aime24")

    Raises:
        UserError: the path is empty, is a pattern without a NAME, or names no task.
    """
    name, sign, path = text.partition("=")
    if not sign or not re.fullmatch(r"[\w.-]+", name) or os.path.exists(text):
        name, path = "", text
    if not path:
        raise UserError(f"{text!r} has no path", where="--data", fix="write NAME=PATH, a path, or a convention")
    if not name and has_magic(path):
        raise UserError(f"the pattern {path!r} has no name", where="--data", fix=f"write NAME={path}")
    source = validated(SourceConfig, {"path": path}, "--data")
    if source.gym_task:
        return name or source.gym_task, source
    convention = name if name in CONVENTIONS else _bare_convention(path)
    if not name:
        name = Path(path).name if Path(path).is_dir() or _is_hub_name(path) else Path(path).stem
    return name, SourceConfig(path=path, convention=convention)


def convention_of(source: SourceConfig) -> Convention:
    """The configured convention; else the one that the path names, by its name or hub data set; else plain columns.

    Raises:
        UserError: unknown convention.
    """
    if source.gym_task:
        return GENERATED
    name = source.convention or _bare_convention(source.path)
    if name and name not in CONVENTIONS:
        raise UserError(
            f"unknown convention {name!r}", where=f"data: {source.path}", fix=f"use one of {', '.join(CONVENTIONS)}"
        )
    return CONVENTIONS[name] if name else PLAIN


def open_source(source: SourceConfig, *, training: bool = False) -> Iterator[Record]:
    """The records of a source, in order.

    Args:
        source: its path is tried as a file, a pattern, a directory, a convention and a hub data set, in this order.
        training: read the convention's training split, or generate rows for training.

    Raises:
        UserError: the source cannot be opened or read.
        RunError: rows cannot be generated.
    """
    path, kind = Path(source.path), kind_of(source)
    if kind == "generated":
        for number, row in enumerate(extension(GYM).gym_rows(source, training=training)):
            yield Record(source.gym_task, number, row, source.path)
    elif kind == "file":
        yield from _file(path)
    elif kind == "pattern":
        for file in _matching(source.path):
            yield from _file(file)
    elif kind == "directory":
        yield from _records(path.name, _tables(_directory(path, source, training)), source.path)
    else:
        yield from _hub(source, training)


def sources_of(config: Config) -> Iterator[tuple[SourceConfig, bool]]:
    """The sources that a run reads, each with whether it reads the training split."""
    if config.rollout.replay is None:
        yield from ((source, True) for source in config.data.train)
        yield from ((source, False) for source in (*config.data.exclude, *config.evaluate.data.values()))


def kind_of(source: SourceConfig) -> Literal["file", "pattern", "directory", "hub", "generated"]:
    """Kind of source that a path names; reads no rows.

    Raises:
        UserError: nothing has this name, it has no parts to choose from, or rows cannot be generated as asked.
    """
    if source.gym_task:
        extension(GYM).make_task(source.gym_task, source.options, where=source.path)  # raises
        return "generated"
    kind: Literal["file", "pattern", "directory"]
    parts: tuple[str, ...]
    if os.path.isfile(source.path):
        kind, parts = "file", ("subset", "split", "revision")
    elif has_magic(source.path):
        _matching(source.path)
        kind, parts = "pattern", ("subset", "split", "revision")
    elif os.path.isdir(source.path):
        kind, parts = "directory", ("revision",)
    else:
        _hub_name(source)
        return "hub"
    _refuse_choice(source, kind, parts)
    return kind


def _refuse_choice(source: SourceConfig, kind: str, keys: Sequence[str]) -> None:
    """Refuse keys that would choose rows of another kind of source: here all rows would be read in silence."""
    for key in keys:
        if getattr(source, key):
            what = f"{key} {getattr(source, key)!r} chooses nothing: this is a {kind}, and all its rows are read"
            raise UserError(what, where=source.path, fix=f"leave {key} out, and name the file of these rows")


def distinct_names(sources: Sequence[SourceConfig]) -> list[dict[str, str]]:
    """For each source: path -> other name, for each file that has the same name as another file.

    The other name is the shortest end of the path, without suffix, that no other file has. One path with several
    settings has its name and the number of the source. A source that is listed twice keeps its names.

    Example: sources "gsm8k/train.jsonl", "math/train.jsonl", "aime.jsonl"
        -> [{"gsm8k/train.jsonl": "gsm8k/train"}, {"math/train.jsonl": "math/train"}, {}]

    Raises:
        UserError: see `kind_of`.
    """
    settings = [source.model_dump_json(exclude={"weight"}) for source in sources]
    files = {
        (own, path): ends
        for own, source in zip(settings, sources, strict=True)
        for path, ends in _ends_of_files(source).items()
    }
    counts = Counter(end for ends in files.values() for end in ends)
    names: dict[str, dict[str, str]] = {own: {} for own in settings}
    for (own, path), ends in files.items():
        if counts[ends[0]] > 1:
            numbered = f"{ends[0]}/{settings.index(own) + 1}"
            names[own][path] = next((end for end in ends if counts[end] == 1), numbered)
    return [names[own] for own in settings]


def _ends_of_files(source: SourceConfig) -> dict[str, list[str]]:
    """The ends of each file's path, the shortest first. Example: {"gsm8k/a.jsonl": ["a", "gsm8k/a", "data/gsm8k/a"]}"""
    if source.gym_task:
        return {source.path: [source.gym_task]}
    kind = kind_of(source)
    if kind == "hub":
        paths = {source.path: Path(_hub_name(source))}
    elif kind == "directory":
        paths = {source.path: Path(os.path.abspath(source.path))}
    else:
        files = _matching(source.path) if kind == "pattern" else [Path(source.path)]
        paths = {str(file): Path(os.path.abspath(file)).with_suffix("") for file in files}
    parts = {name: path.relative_to(path.anchor).parts for name, path in paths.items()}
    return {name: ["/".join(own[-count:]) for count in range(1, len(own) + 1)] for name, own in parts.items()}


def _bare_convention(path: str) -> str:
    """The convention that the path names, by its name or hub data set; empty if a local path of that name exists."""
    if os.path.exists(path):
        return ""
    return next((name for name, convention in CONVENTIONS.items() if path in (name, convention.hub)), "")


def _is_hub_name(path: str) -> bool:
    return _HUB_NAME.fullmatch(path) is not None and not path.endswith(_FILE_SUFFIXES)


def _file(path: Path) -> Iterator[Record]:
    refuse_pointer(path)
    if path.suffix.lower() == ".parquet":
        return _records(path.stem, _batches(path), str(path))
    if path.suffix in _NOT_READ:
        fix = "write it as JSON lines or Parquet, for example with pandas"
        raise UserError(f"{_CANNOT}: files of the kind {path.suffix} are not read", where=str(path), fix=fix)
    return _json_lines(path)


def _json_lines(path: Path) -> Iterator[Record]:
    """The rows of a JSONL file.

    Raises:
        UserError: the file cannot be read, or holds an array: only its last row, without a comma, would parse.
    """
    begun = False
    try:
        with path.open("rb") as file:
            for number, stored in enumerate(file):
                line = stored.removeprefix(b"\xef\xbb\xbf") if number == 0 else stored  # a byte-order mark
                if not line.strip():
                    continue
                if not begun and line.lstrip().startswith(b"[") and _parse(line) == NOT_JSON:
                    raise UserError(f"{_CANNOT}: it begins with '['", where=str(path), fix=ONE_PER_LINE)
                begun = True
                yield Record(path.stem, number, _parse(line), str(path))
    except OSError as error:
        raise UserError(f"{_CANNOT}: {error.strerror}", where=str(path), fix="use a readable file") from error


def _matching(pattern: str) -> list[Path]:
    files = [Path(name) for name in sorted(glob(pattern, recursive=True)) if os.path.isfile(name)]
    if not files:
        raise UserError(f"{_CANNOT}: no file matches the pattern", where=pattern, fix="correct the pattern")
    return files


def _parse(line: bytes) -> dict[str, Any] | str:
    """The row, or the reason why it cannot be read."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError) as error:  # deep nesting ends in a RecursionError
        return LONE_BACKSLASH if str(error).startswith("Invalid \\escape") else NOT_JSON
    return record if isinstance(record, dict) else "not a JSON object"


def _directory(path: Path, source: SourceConfig, training: bool) -> Any:
    """The chosen split of a directory, written by `save_to_disk` or loadable by `datasets`."""
    if any((path / name).exists() for name in _SAVED_TO_DISK):
        _refuse_choice(source, "data set saved to disk", ["subset"])
        splits = _load(source.path, "load_from_disk", str(path))
    else:
        splits = _load(source.path, "streamed", str(path), name=source.subset or None)
    if not isinstance(splits, dict):
        _refuse_choice(source, "data set without splits", ["split"])
        return splits
    only = splits if len(splits) == 1 else ()
    wanted = [source.split] if source.split else [_usual_split(convention_of(source), training), "train", *only]
    chosen = next((name for name in wanted if name in splits), None)
    if chosen is None:
        raise UserError(
            f"{_CANNOT}: no split {wanted[0] or wanted[1]!r}",
            where=source.path,
            fix=f"set split to one of {', '.join(map(str, splits))}",
        )
    return splits[chosen]


def _usual_split(convention: Convention, training: bool) -> str:
    return (training and convention.training_split) or convention.split


def _hub_name(source: SourceConfig) -> str:
    """OWNER/NAME of the hub data set.

    Raises:
        UserError: the path is no such name, and no convention with a data set.
    """
    name = CONVENTIONS[source.path].hub if source.path in CONVENTIONS else source.path
    if not name:
        raise UserError(
            f"the convention {source.path!r} has no hub data set", where=source.path, fix="give a file, or a year"
        )
    if not _is_hub_name(name):
        raise UserError(
            f"{_CANNOT}: no such file, directory or convention",
            where=source.path,
            fix=f"give an existing path, OWNER/NAME of a hub data set, or one of {', '.join(CONVENTIONS)}"
            f"{searched_from(name)}",
        )
    return name


def _hub(source: SourceConfig, training: bool) -> Iterator[Record]:
    name, own = _hub_name(source), CONVENTIONS.get(_bare_convention(source.path), PLAIN)  # not `source.convention`
    rows = _load(
        source.path,
        "load_dataset",
        name,
        name=source.subset or own.subset or None,
        split=source.split or _usual_split(own, training) or "train",
        revision=source.revision or None,
    )
    return _records(name.rpartition("/")[2], _tables(rows), source.path)


def _tables(data: Any) -> Iterator[Any]:
    """Arrow tables of a `datasets` object: 8 times as fast as reading row by row."""
    return iter(data.with_format("arrow").iter(batch_size=BATCH_ROWS))


def _batches(path: Path) -> Iterator[Any]:
    """Arrow batches of a Parquet file, read in this thread.

    Threads of a reader that is not read to its end may abort the process at its exit (seen with `datasets` 5.2).
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS, use_threads=False)


def _records(file: str, tables: Iterator[Any], where: str) -> Iterator[Record]:
    """The rows of arrow tables."""
    number = 0
    while True:
        try:
            with _silent():
                rows = _rows(next(tables))
        except StopIteration:
            return
        except Exception as error:  # on a damaged file, datasets, pyarrow and fsspec raise unrelated classes
            raise _refusal(error, where) from error
        for row in rows:
            yield Record(file, number, row, where)
            number += 1


def _rows(table: Any) -> list[dict[str, Any] | str]:
    """The rows of an arrow table. Parquet files may hold strings that are not UTF-8, and arrow does not check them."""
    readers = _shortest_fields(table.schema)
    try:
        return [row | {name: read(row[name]) for name, read in readers.items()} for row in table.to_pylist()]
    except UnicodeDecodeError:
        if table.num_rows == 1:
            return ["not UTF-8"]
        return [row for number in range(table.num_rows) for row in _rows(table.slice(number, 1))]


def _shortest(kind: Any) -> Callable[[Any], Any] | None:
    """Reads 0.10000000149011612 as 0.1 in values of an arrow type with float32 or float16; None for other types."""
    if (name := str(kind)) in ("float", "halffloat"):
        import numpy as np

        narrow: Callable[[float], object] = np.float32 if name == "float" else np.float16
        return lambda value: None if value is None else float(str(narrow(value)))
    if name.startswith("struct<"):
        return _of_fields(_shortest_fields(kind.fields))
    if name.startswith(("list<", "large_list<", "fixed_size_list<")) and (read := _shortest(kind.value_type)):
        return lambda values: None if values is None else [read(value) for value in values]
    return None


def _of_fields(readers: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    """Reads some fields of a struct; None without such fields."""

    def read(value: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if value is None else value | {name: read(value[name]) for name, read in readers.items()}

    return read if readers else None


def _shortest_fields(fields: Iterable[Any]) -> dict[str, Callable[[Any], Any]]:
    """`_shortest` by name, for the fields that have such values."""
    return {field.name: read for field in fields if (read := _shortest(field.type)) is not None}


def _load(where: str, loader: str, path: str, **options: Any) -> Any:
    """Call a loader of `datasets`, or `_streamed`; its errors become a UserError."""
    import datasets

    load = _streamed if loader == "streamed" else getattr(datasets, loader)
    try:
        with _silent():
            return load(path, **options)
    except Exception as error:  # errors of the hub, files, splits and subsets share no base class
        raise _refusal(error, where) from error


def _streamed(path: str, *, name: str | None) -> Any:
    """The splits of a directory, or one data set. By default an empty first row group of Parquet is an error."""
    import datasets

    builder = datasets.load_dataset_builder(path, name=name)
    if getattr(builder.config, "batch_size", BATCH_ROWS) is None:
        vars(builder.config)["batch_size"] = BATCH_ROWS
    return builder.as_streaming_dataset()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the loggers in _REPEATED off the console."""
    loggers = [logging.getLogger(name) for name in _REPEATED]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


def _is_cached(path: str | bytes | None) -> bool:
    """Whether a path belongs to the cache of `datasets`, and not to the data."""
    from datasets import config

    return os.fsdecode(path or "").startswith(str(config.HF_DATASETS_CACHE))


def _refusal(error: Exception, where: str) -> UserError:
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and _is_cached(error.filename):
        fix = "set HF_DATASETS_CACHE to a directory that can be written, or give the path of JSONL or Parquet files"
    elif isinstance(error, ConnectionError):
        fix = (
            "set HF_HOME to a cache that has the data set, or download it with network access and give its files' path"
        )
    elif type(error).__name__ in ("DatasetNotFoundError", "GatedRepoError"):
        fix = "correct the name, log in to the hub for a gated data set, or give the path of its files"
    else:
        fix = "correct path, subset, split or revision, or repair the file"
    what = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{_CANNOT}: {what[:300]}", where=where, fix=fix)
