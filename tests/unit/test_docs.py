"""Generated docs are up to date, paths named in the docs exist, and the commands in them parse.

tests/e2e/test_first_run.py runs the README's commands. Not covered: whether the prose is true.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from oblr_megatron import step_loop
from oblr_megatron.cli import make_parser
from oblr_megatron.runtime.command_line import parse
from tests.unit.config.test_config import keys

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *EXAMPLES]
KEYS = set(keys())


def test_config_page_is_up_to_date() -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import config_doc; print(config_doc.document(), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == made, "run python tools/config_doc.py"


def test_the_printed_loop_is_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"```python\n(for step in .*?)```", page, re.DOTALL)
    assert textwrap.indent(printed, "    ") in inspect.getsource(step_loop.train), "print the loop of step_loop.py"


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
    if links:  # a file that a command wrote here is in no clone
        asked = ["git", "check-ignore", *((page.parent / path).resolve() for path in links)]
        ignored = subprocess.run(asked, check=False, cwd=ROOT, capture_output=True, text=True)
        assert not ignored.stdout, f"{page.name} links to what git ignores: {ignored.stdout}"


def commands(page: Path) -> list[list[str]]:
    """The arguments of each `oblr-megatron` line in a page's blocks of code, with its continuation lines."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ *oblr-megatron (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_every_command_parses() -> None:
    found = [(page.name, arguments) for page in PAGES for arguments in commands(page)]
    assert len(found) > 50
    for name, arguments in found:
        options = parse(make_parser(), arguments)  # raises a UserError
        for override in getattr(options, "overrides", []):
            assert override.partition("=")[0] in KEYS, f"{name}: {override}"
