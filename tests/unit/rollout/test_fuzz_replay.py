"""Random damage to saved samples: one line, or samples that a run can train on. Nothing is changed.

Not covered: files of other versions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oblr_megatron.errors import UserError
from oblr_megatron.rollout.replay import check_replay
from oblr_megatron.rollout.step_file import KEY, read_step, step_path, write_step
from tests.unit.rollout.test_replay import VOCAB, config_of, saved_step

EXAMPLES = settings(max_examples=30)
NUMBERS = st.integers(-2, 50) | st.sampled_from([-(2**31), 2**31 - 1])
FLOATS = st.floats(width=32)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "group": NUMBERS,
    "prompt_row": NUMBERS,
    "prompt_id": st.text(max_size=3),
    "prompt_ids": st.lists(NUMBERS, max_size=5),
    "answer": st.text(max_size=3),
    "columns": st.text(max_size=3),
    "response_ids": st.lists(NUMBERS, max_size=5),
    "logprobs": st.lists(FLOATS, max_size=5),
    "finish_reason": st.sampled_from(["stop", "length", "late", "", "abort"]),
    "version": NUMBERS,
    "mask": st.lists(st.booleans(), max_size=3),
    "environment_reward": st.none() | st.floats(),
    "reward": st.floats(),
    "routes": st.none() | st.binary(max_size=40),
}
FACTS = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=3) | st.just([]) | st.just(10**30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for step in (1, 2):
        write_step(tmp_path_factory.getbasetemp() / "fuzz" / "rollouts", saved_step(step, model="3f0c7a"))
    return tmp_path_factory.getbasetemp() / "fuzz" / "rollouts"


def refuses_or_trains(directory: Path, content: bytes) -> None:
    """Check the replay with another content of step 1."""
    path = step_path(directory, 1)
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        check_replay(config_of(directory), VOCAB, "3f0c7a")
    except UserError as error:
        assert "\n" not in str(error) and error.fix and len(str(error)) < 1500
    else:
        for sample in read_step(path).samples:
            ids = (*sample.prompt_ids, *sample.response_ids)
            assert sample.prompt_ids and all(0 <= token < VOCAB for token in ids)
            assert sample.response_ids or sample.finish_reason == "late"
            assert len(sample.mask) in (0, len(sample.response_ids))
            assert len(sample.logprobs) == len(sample.response_ids) and len(ids) <= 8 and sample.version == 0
            assert all(math.isfinite(value) and -104 <= value <= 1e-3 for value in sample.logprobs)
    finally:
        assert path.read_bytes() == content
        path.write_bytes(before)


def written(table: pa.Table, **facts: Any) -> bytes:
    stored = json.dumps(json.loads(table.schema.metadata[KEY]) | facts)
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KEY: stored}), sink, write_page_checksum=True)
    return bytes(sink.getvalue())


@EXAMPLES
@given(data=st.data())
def test_bytes(directory: Path, data: st.DataObject) -> None:
    content = step_path(directory, 1).read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content = content[:place] + bytes([data.draw(st.integers(0, 255))]) + content[place + 1 :]
    refuses_or_trains(
        directory, content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )


@EXAMPLES
@given(data=st.data())
def test_cells(directory: Path, data: st.DataObject) -> None:
    table = pq.read_table(step_path(directory, 1))
    for name in data.draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=3)):
        position, field = table.schema.get_field_index(name), table.schema.field(name)
        values = table.column(name).to_pylist()
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(CELLS[name])
        table = table.set_column(position, field, pa.array(values, type=field.type))
    refuses_or_trains(directory, written(table))


@EXAMPLES
@given(
    name=st.sampled_from(
        ["schema_version", "num_prompts", "group_size", "step", "temperature", "epoch", "skipped", "model", "routes"]
    ),
    value=FACTS,
)
def test_facts(directory: Path, name: str, value: Any) -> None:
    refuses_or_trains(directory, written(pq.read_table(step_path(directory, 1)), **{name: value}))
