"""`make docs` builds every page, and refuses dead links and pages that the navigation lacks.

Not covered: how the pages look.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")


def build(where: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command, cwd=where, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documentation's sources."""
    for name in NAMES:
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "study"))
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "docs_site.py", tmp_path / "tools")
    for name in ("slurm", "oblr_megatron", "tests"):  # pages link to files in them
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.slow
def test_the_site_is_built_and_dead_links_are_refused(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "build" / "site"
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert sources < {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert 'href="first_run.html"' in (site / "index.html").read_text()
    assert "data:image/png;base64," in (site / "examples" / "notebook.html").read_text()
    assert "norm-weighted" in (site / "search" / "search_index.js").read_text()

    (copy / "docs" / "data.md").write_text("# Data\n\n[gone](gone.md), [nowhere](config.md#nowhere)\n")
    (copy / "docs" / "lonely.md").write_text("# A page without a place\n")
    broken = build(copy)
    assert broken.returncode != 0
    for name in ("gone.md", "#nowhere", "lonely.md"):
        assert name in broken.stderr
