"""Compile the simulated device once, and start processes that have it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAME = "sim_cuda_device"
TRANSFORMER_ENGINE = ROOT / "build" / "transformer_engine"
"""Its unpacked wheel, if `make test-sim` has fetched it."""


def missing() -> str:
    """What this machine lacks; "" if nothing."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return "a torch built for CUDA, on a machine without a GPU"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "Python's headers"
    return next((tool for tool in ("c++", "ninja") if not shutil.which(tool, path=_path())), "")


@cache
def library() -> Path:
    """The compiled device, in build/: half a minute at the first call with a torch and a source."""
    from torch.utils import cpp_extension

    source = (HERE / "device.cpp").read_bytes()
    key = hashlib.sha256(source + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    file = ROOT / "build" / "sim_cuda" / key / f"{NAME}.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes want it at the same time; one that is killed lets go
        if not file.is_file():
            with TemporaryDirectory(dir=file.parent) as made, mock.patch.dict(os.environ, PATH=_path()):
                cpp_extension.load(NAME, [str(HERE / "device.cpp")], extra_cflags=["-O1"], build_directory=made)
                (Path(made) / file.name).rename(file)
    return file


def environment() -> dict[str, str]:
    """Of a process with the device. Kernels that Triton would compile run as they are written."""
    paths = [str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "SIM_CUDA_LIBRARY": str(library()),
        "TORCHDYNAMO_DISABLE": "1",
    }


def run(arguments: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and the device; both outputs as text."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment() | environ, text=True, capture_output=True, check=False
    )


def passed(report: Path, chosen: str = "", **environ: str) -> int:
    """Tests of tests/gpu, or those `chosen` by name, that pass on the device, and none may fail.

    Those of vLLM and of FP8 are left out.
    """
    names = "not sleep and not fp8" + (f" and ({chosen})" if chosen else "")
    options = ["-q", "-p", "no:cacheprovider", "-k", names, f"--junitxml={report}"]
    done = run(["-m", "pytest", "tests/gpu", *options], **environ)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot()[0].attrib
    return int(suite["tests"]) - int(suite["skipped"])


def _path() -> str:
    """PATH with the tools of this Python's environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
