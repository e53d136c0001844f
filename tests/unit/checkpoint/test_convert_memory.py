"""A conversion holds at most two layers and the largest tensor, for any number of layers, in both directions.

Measured as resident memory of a separate process, after a conversion of a tiny model has loaded every library. The C
library returns freed blocks at once, because what it keeps differs by 10 MB from run to run. Not covered: real sizes
(tools/bench/convert.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_hf_dir

ROOT = Path(__file__).resolve().parents[3]
HIDDEN, FFN, VOCAB = 384, 1536, 8192
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LAYER = 4 * (HIDDEN * (2 * 6 + 2 * 2) * 64 + 3 * HIDDEN * FFN)  # bytes
EMBEDDING = 4 * VOCAB * HIDDEN
SLACK = 8 * 2**20
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # of the C library, in bytes
MEASURE = """
import ctypes, json, re, sys
from pathlib import Path
from oblr_megatron.checkpoint.convert import to_hf, to_megatron

def now(field):
    return int(re.search(rf"^{field}:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024

def growth(convert, *paths):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is set to what is resident
    before = now("VmRSS")
    convert(*paths)
    return now("VmHWM") - before

tiny, model, work = map(Path, sys.argv[1:])
to_megatron(tiny, work / "a")
to_hf(work / "a", work / "b")
print(json.dumps([growth(to_megatron, model, work / "c"), growth(to_hf, work / "c", work / "d")]))
"""


def growths(layers: int, tmp_path: Path) -> list[int]:
    """Growth of resident memory up to the peak of to-megatron and of to-hf, in bytes."""
    tiny = make_hf_dir(tmp_path / "tiny")
    model = make_hf_dir(tmp_path / "model", tied=True, num_hidden_layers=layers, **SIZES)
    assert (model / "model.safetensors").stat().st_size > layers * LAYER + EMBEDDING  # one file
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", MEASURE, str(tiny), str(model), str(tmp_path / "work")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | RETURNED, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from Linux's /proc")
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few, many = growths(6, tmp_path / "few"), growths(30, tmp_path / "many")
    for direction, small, large in zip(("to-megatron", "to-hf"), few, many, strict=True):
        assert large <= 2 * LAYER + EMBEDDING + SLACK, (direction, small, large)
        assert large - small < LAYER, (direction, small, large)
