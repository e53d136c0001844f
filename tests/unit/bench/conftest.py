"""Benchmarks are scripts that import their neighbours by name, and so do their tests."""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"
sys.path.insert(0, str(BENCH))
