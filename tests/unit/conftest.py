"""Markers of whole folders, an environment for each file, hypothesis without deadlines, a tiny model directory.

Studies train toy models for seconds, benchmarks start whole commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Iterator[None]:
    """The next file does not see variables that one leaves, such as those that vLLM and Transformer Engine set."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 directory in fp32, which tests read and copy, and leave as it is."""
    from tests.tiny import make_hf_dir

    return make_hf_dir(tmp_path_factory.mktemp("tiny") / "model")


MARKERS = {"bench": pytest.mark.nightly, "studies": pytest.mark.slow}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {f"{Path(__file__).parent / folder}{os.sep}": marker for folder, marker in MARKERS.items()}
    for item in items:
        for folder, marker in folders.items():
            if str(item.path).startswith(folder):
                item.add_marker(marker)
