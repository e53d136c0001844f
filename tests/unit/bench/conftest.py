"""Benchmarks are scripts that import their neighbours by name, and so do their tests. All of them are nightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCH = HERE.parents[2] / "tools" / "bench"
sys.path.insert(0, str(BENCH))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.nightly)
