"""The core in a copy of the tree without `extras/` and `studies/`: its unit tests pass, and it trains.

Not covered: the tests of examples, tools, pages and of the order of rooms, and two of all fields and of all examples of
pages, because these name the deleted folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import LIMIT_S, ROOT, environment, records

pytestmark = pytest.mark.nightly

FOLDERS = ("oblr_megatron", "tests", "tools", "examples", "docs", "requirements", "slurm")
OF_THE_WHOLE = ("examples", "bench", "tools", "test_docs.py", "test_imports.py")
ALSO_OF_EXTRAS = (  # every field has a reader; every example of a page is valid
    "config/test_config.py::test_every_field_is_read",
    "rewards/test_docs_examples.py::test_every_other_configuration_is_valid",
)
ONLY_THE_COPY = """
import sys
sys.meta_path = [one for one in sys.meta_path if "editable" not in str(getattr(one, "__module__", ""))]
"""
"""An editable installation would find the deleted folders: its finder looks for a package's modules by its own path."""
LIMIT_TESTS_S = 3600


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without the folders."""
    root = tmp_path_factory.mktemp("core")
    without = shutil.ignore_patterns("extras", "studies", "study", "__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=without)
    for file in (file for file in ROOT.iterdir() if file.is_file()):
        shutil.copy(file, root)
    (root / "sitecustomize.py").write_text(ONLY_THE_COPY)
    return root


def in_core(core: Path, *arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python from the copy, which imports the copy alone."""
    alone = environment() | {"PYTHONPATH": str(core)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=core, env=alone, capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_the_folders_are_not_found(core: Path) -> None:
    script = "import oblr_megatron; print(oblr_megatron.__file__); import oblr_megatron.extras"
    result = in_core(core, "-c", script, limit_s=LIMIT_S)
    assert result.stdout.strip() == str(core / "oblr_megatron" / "__init__.py")
    assert "No module named 'oblr_megatron.extras'" in result.stderr


@pytest.mark.timeout(LIMIT_TESTS_S)
def test_the_unit_tests_pass(core: Path) -> None:
    others = [f"--ignore=tests/unit/{name}" for name in OF_THE_WHOLE]
    others += [f"--deselect=tests/unit/{name}" for name in ALSO_OF_EXTRAS]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not nightly and not alone", *others]
    result = in_core(core, "-m", "pytest", "tests/unit", *options, limit_s=LIMIT_TESTS_S)
    assert result.returncode == 0, result.stdout[-5000:]
    assert "failed" not in result.stdout.splitlines()[-1]


def test_it_trains(core: Path, tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    keys = overrides(tmp_path / "run", num_steps=2, log__trackers='["tensorboard"]')
    config = os.fspath(core / "examples" / "tiny_cpu" / "config.toml")
    refused = in_core(core, "-m", "oblr_megatron.cli", "train", config, *keys, "model.batch_invariant=true", limit_s=60)
    assert refused.returncode == 2 and "model.batch_invariant" in refused.stderr and "Fix: " in refused.stderr
    result = in_core(core, "-m", "oblr_megatron.cli", "train", config, *keys, limit_s=LIMIT_S)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
