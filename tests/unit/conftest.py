"""Markers of whole folders, and hypothesis without deadlines and with the same examples in every run.

Studies train toy models for seconds, benchmarks start whole commands.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

MARKERS = {"bench": pytest.mark.nightly, "studies": pytest.mark.slow}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {f"{Path(__file__).parent / folder}{os.sep}": marker for folder, marker in MARKERS.items()}
    for item in items:
        for folder, marker in folders.items():
            if str(item.path).startswith(folder):
                item.add_marker(marker)
