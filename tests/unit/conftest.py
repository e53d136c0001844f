"""Markers of whole folders: studies train toy models for seconds, benchmarks start whole commands."""

from __future__ import annotations

from pathlib import Path

import pytest

MARKERS = {"bench": pytest.mark.nightly, "studies": pytest.mark.slow}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, marker in MARKERS.items():
            if Path(__file__).parent / folder in item.path.parents:
                item.add_marker(marker)
