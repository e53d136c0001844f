"""The overrides that flags stand for, and errors of one line. Not covered: what a run does with them (tests/e2e)."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_RUN, EXIT_USER
from oblr_megatron.runtime.command_line import add_run_arguments, count, guarded, parse, run_overrides, whole

OLD = "old/checkpoints/step_00000004"


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    assert guarded(lambda: print("\N{UPWARDS ARROW} \N{LATIN SMALL LETTER E WITH ACUTE}") or 0) == 0
    assert written.getvalue() == b"\\u2191 \xe9\n"


@pytest.mark.parametrize(
    ("in_file", "given", "resume"),
    [
        ("", [], "newest"),
        ("[checkpoint]\nkeep_last = 3\n", [], "newest"),
        ("", ["checkpoint.resume=none"], "newest"),
        ("", [f"checkpoint.resume={OLD}"], OLD),
        (f"[checkpoint]\nresume = '{OLD}'\n", ["seed=1"], OLD),
        (f"[checkpoint]\nresume = '{OLD}'\n", ["checkpoint.resume=none"], "newest"),
    ],
)
def test_a_flag_does_not_replace_the_checkpoint_of_a_config(
    tmp_path: Path, in_file: str, given: list[str], resume: str
) -> None:
    """Job scripts add --resume to whatever the user gave."""
    file = tmp_path / "config.toml"
    file.write_text(f'run_dir = "run"\nmodel.path = "m"\ndata.train = "t.jsonl"\n{in_file}')
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    options = parse(parser, [str(file), *given, "--resume"])
    assert load_config(file, run_overrides(options)).checkpoint.resume == resume


def test_a_number_has_bounds() -> None:
    assert whole("5000000000", 1, 2**63 - 1) == 5_000_000_000
    for text, bounds in (("0", "of 1 or more"), ("2147483648", "from 1 to 2147483647"), ("x", "of 1 or more")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text}' is not a whole number {bounds}"):
            count(text)


def test_a_full_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has 80 GiB.\nMore words.")

    assert guarded(run) == EXIT_RUN
    [line] = capsys.readouterr().err.splitlines()
    assert "GPU 0 has 80 GiB. Fix: " in line and "More" not in line


def importing(name: str) -> Callable[[], int]:
    """A command that imports a module."""
    return lambda: bool(importlib.import_module(name))


def test_a_missing_package_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(importing("no_such_package.part")) == EXIT_USER
    said = capsys.readouterr().err
    assert "no_such_package " in said and f"[{sys.executable}]" in said and said.count("\n") == 1


def test_a_missing_module_of_ours_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError):
        guarded(importing("oblr_megatron.no_such_module"))
