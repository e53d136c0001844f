"""Bad input on the command line: one clear line, exit status 2, and nothing written or started.

Each case is a typical mistake; test_cli.py, preflight/test_command.py and the unit tests of single checks have the
others. Most cases fork a process with all imports done. Those in WHOLE_COMMAND start the command itself. Not covered:
mistakes that show only on a GPU.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import run
from tests.e2e.forked import CONFIG, forked_cli

Edit = Callable[[Path, dict[str, object]], None]


def _unknown_key(_: Path, keys: dict[str, object]) -> None:
    keys["algo.baselin"] = "rloo"


def _heads(_: Path, keys: dict[str, object]) -> None:
    keys["parallel.tensor_model_parallel_size"] = 3
    keys["--nproc-per-node"] = 3


def _truncated_model(root: Path, keys: dict[str, object]) -> None:
    weights = root / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _unsupported(root: Path, keys: dict[str, object]) -> None:
    path = root / "model" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    path.write_text(json.dumps(config))


def _whole_numbers(root: Path, keys: dict[str, object]) -> None:
    weights = root / "model" / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, weights, metadata={"format": "pt"})


def _engines(_: Path, keys: dict[str, object]) -> None:
    keys["rollout.num_engines"] = 5


def _wide_engine(_: Path, keys: dict[str, object]) -> None:
    keys["rollout.tensor_parallel_size"] = 2


def _no_such_tracker(_: Path, keys: dict[str, object]) -> None:
    keys["log.trackers"] = '["wandbb"]'


def _owned_option(_: Path, keys: dict[str, object]) -> None:
    keys["rollout.vllm.max_model_len"] = 4096


def _impossible_mode(_: Path, keys: dict[str, object]) -> None:
    keys["algo.baseline"] = "optimal"
    keys["gradnorm.mode"] = "inline"


def _buffers_do_not_fit(_: Path, keys: dict[str, object]) -> None:
    keys["algo.baseline"] = "optimal"  # with "pooled" one gradient is kept
    keys["gradnorm.mode"] = "stash"
    keys["group_size"] = 10**6


CASES: dict[str, tuple[Edit, str]] = {
    "unknown key": (_unknown_key, "baseline"),
    "heads do not divide": (_heads, "num_attention_heads"),
    "model truncated": (_truncated_model, "model.safetensors"),
    "unsupported": (_unsupported, "gpt2"),
    "weights in whole numbers": (_whole_numbers, "dtype I8"),
    "too many engines": (_engines, "engines"),
    "tensor-parallel engine on a CPU": (_wide_engine, "tensor_parallel_size"),
    "no such tracker": (_no_such_tracker, "'wandbb'"),
    "engine option that we set": (_owned_option, "max_response_tokens"),
    "norm mode impossible": (_impossible_mode, "reads norms of its own step"),
    "stash does not fit": (_buffers_do_not_fit, "1000000 stashed gradients"),
}
WHOLE_COMMAND = {"unknown key", "heads do not divide"}
COMMAND = [sys.executable, "-m", "oblr_megatron.cli"]


def test_port_taken(tiny: Path, tmp_path: Path) -> None:
    """A rendezvous port in use is refused before torchrun starts."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        keys = [f"run_dir={tmp_path / 'run'}", f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}"]
        launch = ["--nproc-per-node", "2", "--master-port", port, f"evaluate.data.heldout={tiny / 'heldout.jsonl'}"]
        result = forked_cli(["train", CONFIG, *launch, *keys])
    assert result.returncode == 2, result.stderr[-2000:]
    assert f"cannot listen on port {port}" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_line(case: str, tiny: Path, tmp_path: Path) -> None:
    edit, expected = CASES[case]
    shutil.copytree(tiny / "model", tmp_path / "model")
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copy(tiny / name, tmp_path / name)
    keys: dict[str, object] = {
        "run_dir": tmp_path / "run",
        "model.path": tmp_path / "model",
        "data.train": tmp_path / "train.jsonl",
        "evaluate.data.heldout": tmp_path / "heldout.jsonl",
        "evaluate.every_steps": 0,
    }
    edit(tmp_path, keys)
    before = sorted(tmp_path.rglob("*"))
    ranks = keys.pop("--nproc-per-node", 1)
    arguments = ["train", CONFIG, "--nproc-per-node", str(ranks), *(f"{key}={value}" for key, value in keys.items())]
    result = run([*COMMAND, *arguments], 120) if case in WHOLE_COMMAND else forked_cli(arguments)
    assert result.returncode == 2, result.stderr[-2000:]
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and expected in errors[0], result.stderr
    assert sorted(tmp_path.rglob("*")) == before, "a refused run must leave nothing behind"
