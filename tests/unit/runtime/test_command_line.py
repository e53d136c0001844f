"""The overrides that flags stand for. Not covered: what the run does with them (tests/e2e)."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from oblr_megatron.config import load_config
from oblr_megatron.runtime.command_line import add_run_arguments, parse, run_overrides

OLD = "old/checkpoints/step_00000004"


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
