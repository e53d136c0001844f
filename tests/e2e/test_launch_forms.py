"""Runs in the launch environments of the wild: variables of launchers, proxies, homes and limits as clusters have them.

`source` is the thread that shows the form. Left-over ranks: test_left_over_variables.py. Not covered: GPUs.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import LIMIT_S, ROOT, environment, records

pytestmark = pytest.mark.nightly
COMMAND = [sys.executable, "-m", "oblr_megatron.cli", "train", "examples/tiny_cpu/config.toml"]
SLURM = {"JOB_ID": "7", "NTASKS": "8", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NUM_NODES": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMI_RANK": "1"}
DEAD = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD)
NOWHERE = {"HOME": "/proc/nobody", "HF_HOME": "/proc/nobody/hf", "XDG_CACHE_HOME": "/proc/nobody/cache"}
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize(
    ("source", "variables", "files"),
    [
        ("Lightning-AI/pytorch-lightning#20776", {f"SLURM_{name}": value for name, value in SLURM.items()}, 0),
        ("open-mmlab/mmcv#1682, pytorch/pytorch#97507", MPI, 0),
        ("run-llama/llama_index#13640, bentoml/OpenLLM#79", PROXIES, 0),
        ("vllm-project/vllm#20127, huggingface/huggingface_hub#2797", NOWHERE, 0),
        ("vllm-project/vllm#23684", {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ("Megvii-BaseDetection/YOLOX#220", ASCII, 0),
        ("verl-project/verl#3642, facebookresearch/fairseq#87", {}, 256),
    ],
)
def test_a_run_ends_as_usual(
    source: str, variables: dict[str, str], files: int, tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    """`files` is the limit of open files, hard and soft; the run directory has a name beyond ASCII."""

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    run_dir = tmp_path / "l\u00e4uft"
    done = subprocess.run(
        [*COMMAND, *overrides(run_dir)],
        cwd=ROOT,
        env=environment() | variables,
        preexec_fn=limit,
        umask=0o077,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (source, done.stderr[-3000:])
    assert [record["step"] for record in records(run_dir)] == [1] and (run_dir / "hf" / "config.json").exists()
