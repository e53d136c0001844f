"""The samples of one step as a file, RUN_DIR/rollouts/step_000001.parquet: one row per sample, prompt-major.

    path = write_step(run_dir / ROLLOUTS, SavedStep(step=1, ...))
    saved = read_step(path)

`SCHEMA` lists the columns. The file's metadata describes the whole step (schema version, step, sizes, temperature, data
position), as JSON under `KEY`. Any reader of parquet can open the file, e.g. `pandas.read_parquet(path)`.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oblr_megatron.errors import UnwrittenError, UserError
from oblr_megatron.types import RECORDED, FinishReason, Prompt, Sample

KEY = b"oblr_rollouts"
PROMPT_COLUMNS = {"prompt_row": "row", "prompt_id": "id", "prompt_text": "text"} | {
    name: name for name in ("answer", "source", "tolerance", "columns")
}
"""Column -> field of `Prompt`."""
ROUTES = "routes"
"""The column of routes, and the fact that holds their sizes [layers, k]."""
STEP_FACTS = ("step", "temperature", "epoch", "skipped", "model", "position", "filters")
SCHEMA_VERSION = 1
BATCH_BYTES = 2**28
"""Most bytes of a column that pyarrow takes at once: a dictionary and a page end at 2 GiB."""


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=name in ("environment_reward", "routes", "recorded"))
        for name, kind in (
            ("group", pa.int32()),  # position of the prompt in the step
            ("prompt_row", pa.int64()),  # line of the data file, from 0
            ("prompt_id", pa.string()),
            ("prompt_text", pa.string()),
            ("prompt_ids", _list(pa.int32())),
            ("answer", pa.string()),
            ("source", pa.string()),
            ("tolerance", pa.string()),
            ("columns", pa.string()),  # the data row as JSON; empty without data.keep_columns
            ("response_ids", _list(pa.int32())),
            ("logprobs", _list(pa.float32())),  # vLLM computes them in float32: no digit is lost
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("version", pa.int32()),
            ("mask", _list(pa.bool_())),  # where the policy wrote the response; empty: everywhere
            ("environment_reward", pa.float64()),  # null if no environment gave one
            ("reward", pa.float64()),
            ("routes", pa.large_binary()),  # int16 little-endian [tokens, layers, k]; null: none
            ("recorded", pa.large_binary()),  # types.RECORDED [response tokens, k]; null: none
        )
    ]
)


FIX = "use the rollouts directory of a run with --save-rollouts; if a file is damaged, save the samples again"


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The prompts, samples and rewards of one step.

    Example: SavedStep(step=1, temperature=1.0, epoch=0, skipped=3, prompts=[...], samples=[...], rewards=[1.0, 0.0])
    """

    step: int  # counted from 1, as in metrics.jsonl
    temperature: float
    epoch: int  # the data's epoch after the step
    skipped: int  # rows of the data that were skipped
    prompts: list[Prompt]  # Q
    samples: list[Sample]  # N = Q * G
    rewards: list[float]  # N, as the run scored them
    model: str = ""  # fingerprint of the weights that the run started from; empty: not known, and not compared
    position: dict[str, Any] = field(default_factory=dict)  # in the data, after the step
    filters: dict[str, float] = field(default_factory=dict)  # of the draws: `RolloutConfig.filters`

    @property
    def group_size(self) -> int:
        """G."""
        return len(self.samples) // max(len(self.prompts), 1)


def step_path(directory: Path, step: int) -> Path:
    """File of a step; `step` counts from 1."""
    return directory / f"step_{step:06}.parquet"


def _largest_cell(row: dict[str, Any]) -> int:
    """Bytes, or characters, of a row's largest value, at least 1."""
    return max(1, *(len(value) for value in row.values() if isinstance(value, (bytes, str))))


def write_step(directory: Path, saved: SavedStep) -> Path:
    """Write a step's file atomically.

    Raises:
        UnwrittenError: it cannot be written; no part of it stays.
    """
    path = step_path(directory, saved.step)
    partial = path.with_name(f".{path.name}.partial")
    facts = {
        "schema_version": SCHEMA_VERSION,
        "num_prompts": len(saved.prompts),
        "group_size": saved.group_size,
        **{name: getattr(saved, name) for name in STEP_FACTS},
        ROUTES: next((list(one.routes.shape[1:]) for one in saved.samples if one.routes is not None), None),
    }
    rows = [_row(saved, position) for position in range(len(saved.samples))]
    try:
        table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({KEY: json.dumps(facts)}))
        directory.mkdir(parents=True, exist_ok=True)
        at_once = max(1, min(1024, BATCH_BYTES // max(map(_largest_cell, rows))))
        pq.write_table(table, partial, compression="zstd", write_page_checksum=True, write_batch_size=at_once)
        os.replace(partial, path)
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a text that UTF-8 cannot write
        with suppress(OSError):  # a full disk needs the room
            partial.unlink(missing_ok=True)
        raise UnwrittenError(f"cannot write the samples of step {saved.step}: {error}") from error
    return path


def read_step(path: Path) -> SavedStep:
    """Read and check a step's file.

    Raises:
        UserError: the file is missing, damaged, inconsistent, or not written by `write_step`.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        facts = _facts(table, path)
        own = {name: facts[name] for name in STEP_FACTS}
        rows = table.to_pylist()
    except FileNotFoundError:
        raise _refusal("saved samples are missing", path) from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, LookupError, MemoryError, RecursionError, pa.ArrowException) as error:
        # damaged files and damaged facts raise any of them
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _refusal(f"saved samples cannot be read: {reason:.300}", path) from error
    group_size = facts["group_size"]
    firsts = rows[::group_size]
    saved = SavedStep(
        **own,
        prompts=[_prompt(row) for row in firsts],
        samples=[_sample(row, facts.get(ROUTES), path) for row in rows],
        rewards=[row["reward"] for row in rows],
    )
    _check_consistent(saved, rows, facts, path)
    return saved


def _refusal(what: str, path: Path, fix: str = FIX) -> UserError:
    return UserError(what, where=str(path), fix=fix)


def _row(saved: SavedStep, position: int) -> dict[str, Any]:
    sample = saved.samples[position]
    prompt = saved.prompts[sample.group]
    columns = {column: getattr(prompt, name) for column, name in PROMPT_COLUMNS.items()}
    routes = None if sample.routes is None else sample.routes.astype("<i2", copy=False).tobytes()
    recorded = None if sample.recorded is None else sample.recorded.tobytes()
    arrays = {ROUTES: routes, "recorded": recorded}
    return asdict(replace(sample, routes=None, recorded=None)) | columns | arrays | {"reward": saved.rewards[position]}


def _prompt(row: dict[str, Any]) -> Prompt:
    columns = {name: row[column] for column, name in PROMPT_COLUMNS.items()}
    return Prompt(token_ids=tuple(row["prompt_ids"]), **columns)


def _sample(row: dict[str, Any], shape: Any, path: Path) -> Sample:
    values: dict[str, Any] = {column.name: row[column.name] for column in fields(Sample)}
    lists = ("prompt_ids", "response_ids", "logprobs", "mask")
    sample = Sample(**values | {name: tuple(values[name]) for name in lists})
    if row["recorded"] is not None:
        count = len(sample.response_ids)
        recorded = _array(row["recorded"], RECORDED, count, [-1 if count else 0], "recorded tokens", path)
        sample = replace(sample, recorded=recorded)
    if sample.routes is None:
        return sample
    routes = _array(row[ROUTES], "<i2", sample.num_tokens, shape, "routes", path)
    return replace(sample, routes=routes.astype(np.int16))


def _array(data: bytes, kind: Any, count: int, of_one: Any, what: str, path: Path) -> NDArray[Any]:
    """[count, *of_one]"""
    try:
        return np.frombuffer(data, kind).reshape(count, *of_one)
    except (ValueError, TypeError, OverflowError) as error:
        raise _refusal(f"saved {what} do not fit their sample: {error}", path) from error


def _facts(table: pa.Table, path: Path) -> dict[str, Any]:
    """The facts about the whole step, checked."""
    stored = (table.schema.metadata or {}).get(KEY)
    if stored is None:
        raise _refusal("the file has no saved samples", path)
    facts: dict[str, Any] = json.loads(stored)
    version = facts["schema_version"]
    if version != SCHEMA_VERSION:
        what = f"the file has schema version {version!r:.40}, but only {SCHEMA_VERSION} can be read"
        raise _refusal(what, path, "save and replay with the same version of oblr-megatron")
    if not table.schema.equals(SCHEMA):
        raise _refusal("the columns of the saved samples are not those of the schema", path)
    counts = [facts[name] for name in ("num_prompts", "group_size", "step", "epoch", "skipped")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"the sizes of the step are {counts}")
    float(facts["temperature"])
    if not (isinstance(facts["model"], str) and isinstance(facts["position"], dict)):
        raise ValueError("the model and the data position are no text and no table")
    if not facts["num_prompts"] * facts["group_size"] == table.num_rows > 0:
        sizes = f"{facts['num_prompts']} x {facts['group_size']}"
        raise _refusal(f"the file has {table.num_rows} samples instead of {sizes}", path)
    return facts


def _check_consistent(saved: SavedStep, rows: list[dict[str, Any]], facts: dict[str, Any], path: Path) -> None:
    """Check that rows are in order, and that each has its prompt and as many log-probs as tokens."""
    if step_path(path.parent, saved.step) != path:
        raise _refusal(f"the file holds step {saved.step}", path, "do not rename saved samples")
    for position, (row, sample) in enumerate(zip(rows, saved.samples, strict=True)):
        group = position // facts["group_size"]
        fits = (
            sample.group == group
            and _prompt(row) == saved.prompts[group]
            and len(sample.logprobs) == len(sample.response_ids)
            and len(sample.mask) in (0, len(sample.response_ids))
            and sample.finish_reason in get_args(FinishReason)
        )
        if not fits:
            raise _refusal(f"saved sample {position} is inconsistent", path)
