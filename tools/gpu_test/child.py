"""The process of one line: `python -m tools.gpu_test.child MODULE:FUNCTION REPORT ARGUMENTS_AS_JSON`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from tools.gpu_test.report import ROOT, Report


def main(measure: str, path: str, arguments: str) -> None:
    """Call a line's function with its arguments."""
    sys.path.append(str(ROOT / "tools" / "bench"))  # benchmarks import their neighbours by name
    module, function = measure.split(":")
    found = import_module(module if "." in module else f"tools.gpu_test.{module}")
    getattr(found, function)(Report(Path(path)), **json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
