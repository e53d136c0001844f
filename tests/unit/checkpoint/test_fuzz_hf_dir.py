"""Random damage to model directories: one line and nothing changed, or a directory that transformers opens.

Not covered: wrong weight values, and the merges of a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from oblr_megatron.checkpoint.hf_dir import INDEX, SINGLE, check_hf_dir
from oblr_megatron.checks.layout import check_layout
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.machine import check_head_size
from oblr_megatron.errors import UserError
from tests.tiny import make_hf_dir, make_moe_hf_dir
from tests.unit.configs import config_with

CONFIG = config_with("data.max_prompt_tokens=64")
ODD = st.sampled_from(
    [0, 1, -1, 2, 3, 48, 10**6, 10**30, 0.5, 1e308, -0.0, math.nan, math.inf, True, False, None, "", "48"]
)
ODD = ODD | st.sampled_from(
    ["silu", "yarn", "qwen3_moe", [], [1], {}, {"rope_type": "yarn"}, {"rope_theta": None}, "x" * 500]
)
EXAMPLES = settings(max_examples=30)


@pytest.fixture(scope="module", params=["dense", "tied", "experts", "shards"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "model"
    if request.param == "experts":
        return make_moe_hf_dir(path, head_dim=32)
    size = "20KB" if request.param == "shards" else "5GB"
    return make_hf_dir(path, tied=request.param == "tied", head_dim=32, max_shard_size=size)


@contextmanager
def changed(file: Path, content: bytes) -> Iterator[Path]:
    """The directory while one of its files has another content; nothing else may change in it."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        listed = {path: path.stat().st_mtime_ns for path in file.parent.iterdir()}
        yield file.parent
        assert {path: path.stat().st_mtime_ns for path in file.parent.iterdir()} == listed
    finally:
        file.write_bytes(before)


def refuses_or_opens(path: Path) -> None:
    """The checks of a run's model; what they let pass can be opened."""
    try:
        found = check_hf_dir(path)
        opened = found.hf_config()
        check_layout(found.config, CONFIG, 1)
        check_positions(CONFIG, found.config)
        check_head_size(found.config, path, on_gpu=False)
        tokenizer = found.tokenizer()
    except UserError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1500 and error.fix
        return
    assert len(tokenizer) <= opened.vocab_size and opened.head_dim * opened.num_attention_heads > 0
    held = {}
    for file in found.weight_files:
        with safe_open(path / file, framework="pt") as tensors:
            held |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            for name in tensors.keys():  # noqa: SIM118
                assert tensors.get_tensor(name).dtype.is_floating_point
    assert held == found.shapes and len(found.fingerprint) == 16


@EXAMPLES
@given(data=st.data())
def test_config_json(model: Path, data: st.DataObject) -> None:
    config = json.loads((model / "config.json").read_text())
    for name in data.draw(st.lists(st.sampled_from([*config, "rope_theta", "rope_scaling", "auto_map"]), max_size=3)):
        config[name] = data.draw(ODD)
        if data.draw(st.integers(0, 9)) == 0:
            del config[name]
    with changed(model / "config.json", json.dumps(config).encode()) as path:
        refuses_or_opens(path)


def damaged(content: bytes, data: st.DataObject, first: int) -> bytes:
    """A byte changed among the first ones, or the file cut off, or both."""
    place = data.draw(st.integers(0, min(first, len(content)) - 1))
    content = content[:place] + bytes([data.draw(st.integers(0, 255))]) + content[place + 1 :]
    return content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content


@EXAMPLES
@given(data=st.data())
def test_bytes_of_any_file(model: Path, data: st.DataObject) -> None:
    names = sorted(path.name for path in model.iterdir() if path.name != "generation_config.json")
    file = model / data.draw(st.sampled_from(names))
    with changed(file, damaged(file.read_bytes(), data, 4000)) as path:
        refuses_or_opens(path)


@EXAMPLES
@given(data=st.data())
def test_fields_of_a_header(model: Path, data: st.DataObject) -> None:
    file = next(path for path in sorted(model.iterdir()) if path.suffix == ".safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensor = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    value = (
        ODD
        | st.lists(st.integers(-1, 9000), max_size=3)
        | st.sampled_from(["BF16", "F16", "I8", "F8_E4M3", "U16", "X"])
    )
    change: Callable[[], Any] = data.draw(
        st.sampled_from(
            [
                lambda: header[tensor].update(
                    {data.draw(st.sampled_from([*header[tensor], "more"])): data.draw(value)}
                ),
                lambda: header.update({tensor: data.draw(value)}),
                lambda: header.update({"__metadata__": data.draw(value)}),
                lambda: header.update({data.draw(st.text(max_size=3)): header.pop(tensor)}),
                lambda: header.pop(tensor),
            ]
        )
    )
    change()
    new = json.dumps(header).encode()
    with changed(file, len(new).to_bytes(8, "little") + new + content[8 + length :]) as path:
        refuses_or_opens(path)


@pytest.mark.parametrize("model", ["shards"], indirect=True)
@EXAMPLES
@given(data=st.data())
def test_an_index(model: Path, data: st.DataObject) -> None:
    index = json.loads((model / INDEX).read_text())
    tensor = data.draw(st.sampled_from(sorted(index["weight_map"])))
    index["weight_map"][tensor] = data.draw(ODD | st.sampled_from([SINGLE, "../x", *index["weight_map"].values()]))
    with changed(model / INDEX, json.dumps(index).encode()) as path:
        refuses_or_opens(path)
