"""Tests of this folder start processes with the simulated device; they are skipped where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_cuda.launch import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skipif(bool(lacking), reason=f"needs {lacking}"))
