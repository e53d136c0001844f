"""Generated docs are up to date, and paths named in the docs exist. Not covered: whether the prose is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_config_page_is_up_to_date() -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import config_doc; print(config_doc.document(), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == made, "run python tools/config_doc.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(
        r"`((?:oblr_megatron|tests|tools|examples|docs|requirements)/[\w./-]+\.(?:py|md|toml|txt))`", text
    )
    for path in links:
        assert (page.parent / path).exists(), f"{page.name} links to {path}"
    for path in named:
        assert (ROOT / path).exists(), f"{page.name} names {path}"
