"""Fixtures of the studies' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A start of the task "brackets", to be read only."""
    from studies.start import prepare

    return prepare("brackets", "high", tmp_path_factory.mktemp("starts"), steps=80)
