"""Markers of whole folders, and hypothesis without deadlines and with the same examples in every run.

Studies train toy models for seconds, benchmarks start whole commands.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

MARKERS = {"bench": pytest.mark.nightly, "studies": pytest.mark.slow}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder, marker in MARKERS.items():
            if Path(__file__).parent / folder in item.path.parents:
                item.add_marker(marker)
