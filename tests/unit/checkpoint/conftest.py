"""The model and the checkpoint that several files of tests convert, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oblr_megatron.checkpoint.convert import to_megatron
from oblr_megatron.cli import main
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf, a directory in fp32, and checkpoint, its conversion."""
    root = tmp_path_factory.mktemp("convert")
    make_hf_dir(root / "hf")
    to_megatron(root / "hf", root / "checkpoint")
    return root


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls `convert` with arguments that it refuses; returns the one line that it prints."""

    def run(*arguments: object, status: int = 2) -> str:
        capsys.readouterr()
        assert main(["convert", *map(str, arguments)]) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    return run
