"""A run that stops under one megatron-core and resumes under another equals the unbroken run, bit for bit.

OBLR_OTHER_PYTHON names the interpreter of a second environment with another megatron-core; without it this is skipped.
Not covered: GPUs, and a second environment with another torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.checks.packages import installed_version
from tests.distributed.replayed import certain, config_of, exported, make_inputs, stored, train
from tests.distributed.test_resume import assert_equal, beginning_of
from tests.tiny import make_moe_hf_dir

OTHER = os.environ.get("OBLR_OTHER_PYTHON", "")
ROOT = Path(__file__).resolve().parents[2]
VERSION = "from oblr_megatron.checks.packages import installed_version; print(installed_version('megatron-core'))"
TRAIN = """
import sys
from pathlib import Path
from tests.distributed.replayed import config_of, train

train(config_of(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not OTHER, reason="OBLR_OTHER_PYTHON is not set")]


def there(script: str, *arguments: object) -> str:
    """Run a script in the other environment, with this checkout's code; returns its output."""
    command = [OTHER, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_other_environment_has_another_megatron_core() -> None:
    assert there(VERSION).strip() not in ("None", installed_version("megatron-core"))


@pytest.mark.parametrize("resumes", ["here", "there"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "mixture"])
def test_four_steps_of_one_version_and_four_of_another_are_eight(tmp_path: Path, resumes: str, moe: bool) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    if moe:
        shutil.rmtree(inputs / "model")
        make_moe_hf_dir(inputs / "model")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    resume = "checkpoint.resume=newest"
    if resumes == "here":
        there(TRAIN, inputs, whole)
        train(config_of(inputs, beginning_of(whole, parts), resume))
    else:
        train(config_of(inputs, whole))
        there(TRAIN, inputs, beginning_of(whole, parts), resume)
    assert certain(parts) == certain(whole) and len(certain(whole)) == 8
    assert_equal(exported(parts), exported(whole))
    assert_equal(*stored(checkpoints_of(parts)[0], checkpoints_of(whole)[0]))
