"""Resolve requirements/gpu.in and write the complete lock of the GPU stack, requirements/gpu.txt.

    python tools/lock_gpu.py      # make lock-gpu; a minute, 30 MB of metadata

uv resolves it for Python 3.12 on Linux x86-64 from metadata alone. So it runs under any Python and downloads no wheels,
which take 4 GB. vLLM needs llguidance, and llguidance has no wheels for a glibc older than 2.31.

transformer-engine-torch exists only as source, and its requirements are known only once torch is installed. gpu.in
lists them; requirements/build_te.sh builds it, at the version that requirements/te.txt takes from the lock.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
UV = "uv==0.13.9"
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")  # of reasoning-gym; small, built on installation
TARGET = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31")
HEADER = """\
# Complete lock of the GPU stack for Python 3.12, made from gpu.in by `make lock-gpu`. `make gpu-env` installs it with
# `pip install --no-deps`: every package is listed here and nothing else is resolved.
"""
TE_HEADER = """\
# Built from source against the torch of gpu.txt by requirements/build_te.sh; written by `make lock-gpu`.
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", UV], check=True)
        command = [python, "-m", "uv", "pip", "compile", "--quiet", "--no-python-downloads", *TARGET]
        command += [argument for name in SOURCE_ONLY for argument in ("--no-binary", name)]
        command += ["--only-binary", ":all:", "--no-header", "--no-annotate", str(REQUIREMENTS / "gpu.in")]
        pins = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    engine = re.search(r"^transformer-engine==(\S+)$", pins, re.MULTILINE)
    assert engine is not None, "requirements/gpu.in does not name transformer-engine"
    (REQUIREMENTS / "gpu.txt").write_text(HEADER + pins, encoding="utf-8")
    (REQUIREMENTS / "te.txt").write_text(f"{TE_HEADER}transformer-engine-torch=={engine[1]}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
