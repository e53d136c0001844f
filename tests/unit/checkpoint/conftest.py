"""The model and the checkpoint that several files of tests convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from oblr_megatron.checkpoint.convert import to_megatron
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, a directory in fp32, and checkpoint, its conversion."""
    root = tmp_path_factory.mktemp("convert")
    make_hf_dir(root / "hf")
    to_megatron(root / "hf", root / "checkpoint")
    return root
