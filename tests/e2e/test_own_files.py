"""A user's files that are named like modules of Python and of libraries: every process of a run imports the real ones.

Real processes: the command, the launcher, two ranks, their engines, a fork server, and a tracker's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from tests.e2e.conftest import LIMIT_S, ROOT, environment, records

NAMES = (
    *("token", "random", "json", "signal", "typing", "types_", "queue", "tempfile", "platform", "logging", "inspect"),
    *("datasets", "transformers", "torch", "numpy", "vllm", "safetensors", "pydantic", "helper", "tests", "utils"),
)
REWARD = """
import helper

def score(response, answer):
    return helper.VALUE * len(response)
"""


def test_a_run_in_a_directory_with_files_named_like_modules(
    tmp_path: Path, tiny: Path, overrides: Callable[..., list[str]]
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is the file of the user')\n")
    (tmp_path / "helper.py").write_text("VALUE = 0.1\n")
    (tmp_path / "own_reward.py").write_text(REWARD)
    pd.read_json(tiny / "train.jsonl", lines=True).to_parquet(tmp_path / "train.parquet")
    keys = overrides(
        tmp_path / "run",
        data__train=tmp_path / "train.parquet",
        reward__name="own_reward:score",
        log__trackers='["tensorboard"]',
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "oblr_megatron.cli",
        "train",
        os.fspath(ROOT / "examples/tiny_cpu/config.toml"),
    ]
    result = subprocess.run(
        [*command, *keys, "--nproc-per-node", "2"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0 and "of the user" not in result.stderr, result.stderr[-3000:]
    assert [record["step"] for record in records(tmp_path / "run")] == [1]
