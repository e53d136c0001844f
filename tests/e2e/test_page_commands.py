"""The first command of every page of docs/ runs as it is written, on the tiny model.

A first block of TOML is a valid part of a config, one of Python runs. Commands that start an engine or take long run
nightly. Not covered: pages in ELSEWHERE, later commands of a page (tests/unit/test_docs.py parses them).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.config import parse_config
from tests.e2e.conftest import LIMIT_S, ROOT, environment
from tests.e2e.forked_processes import popen

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
ELSEWHERE = {
    "architecture": "an excerpt of step_loop.py: tests/unit/test_docs.py",
    "cluster": "a whole job: tests/e2e/test_slurm.py",
    "config": "a reference without commands",
    "evidence": "hours of training runs",
    "gpu": "`make gpu-env` installs the stack for GPUs",
    "results": "tables; each row names its own command",
    "servers": "a server that does not end: tests/e2e/test_servers.py",
}
QUICK = ("report", "plan", "doctor", "init")
"""Commands that start no engine; `train --dry-run` is another."""

CONFIG = """\
run_dir = "run/config"
num_steps = 1
num_prompts = 16
group_size = 4
[model]
path = "MODEL_DIR"
make_vocab_size_divisible_by = 8
[data]
train = "train.jsonl"
max_prompt_tokens = 16
[rollout]
max_response_tokens = 6
kv_cache_gib = 0.25
[reward]
name = "exact_match"
[evaluate]
data = { heldout = "heldout.jsonl" }
every_steps = 0
samples_per_prompt = 2
"""


def first_block(text: str, language: str = r"\w+") -> tuple[str, str]:
    """(language, code) of a page's first block, or of its first one in a language."""
    found = re.search(rf"^```({language})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ("", "") if found is None else (found[1], found[2])


def first_command(page: str) -> str:
    """The first command of a page with its continuation lines, without its comment."""
    lines = first_block(PAGES[page])[1].replace("\\\n", " ").splitlines()
    return next(line for text in lines if (line := text.partition(" #")[0].strip()) and not line.startswith("#"))


def pages_in(*languages: str, quick: bool | None = None) -> list[str]:
    """Pages by the language of their first block, and by whether their first command is quick."""
    names = [name for name in PAGES if name not in ELSEWHERE and first_block(PAGES[name])[0] in languages]
    return names if quick is None else [name for name in names if is_quick(first_command(name)) is quick]


def is_quick(command: str) -> bool:
    return command.split()[1] in QUICK or "--dry-run" in command


@pytest.fixture
def workplace(tiny: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the files that the pages name."""
    for name in ("CONFIG.toml", "config.toml"):
        (tmp_path / name).write_text(CONFIG, encoding="utf-8")
    for name in ("MODEL_DIR", "models/Qwen3-8B", "models/Qwen3-0.6B"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tiny / "model")
    shutil.copytree(saved, tmp_path / "RUN_DIR")
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copy(tiny / name, tmp_path)
    for name in ("gsm8k_train", "gsm8k_test", "mine"):
        shutil.copy(tiny / "heldout.jsonl", tmp_path / "data" / f"{name}.jsonl")
    for name in ("examples", "slurm", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(command: str) -> str:
    """Give a command what others must not find."""
    if "init" in command:
        Path("config.toml").unlink()
    if "convert" in command:  # for `plan` the name is that of the published model
        Path("Qwen3-8B").symlink_to(Path("MODEL_DIR").resolve())
    return command


def run(command: list[str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment() | {"PATH": path, "WANDB_MODE": "offline"}
    pipe = subprocess.PIPE
    with popen(command, env=variables, stdout=pipe, stderr=pipe, text=True) as process:
        out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, f"{command}\n{out[-1000:]}\n{errors[-3000:]}"


def test_every_page_has_a_first_command() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    for name, text in PAGES.items():
        language = first_block(text)[0]
        assert name in ELSEWHERE or language in ("sh", "toml", "python"), f"docs/{name}.md begins without a command"
        if name not in ("config", "results"):
            assert text.index("```") < 1500, f"the first command of docs/{name}.md comes late"


@pytest.mark.parametrize("page", pages_in("toml"))
def test_a_block_of_toml_is_part_of_a_config(page: str) -> None:
    def joined(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        both = base | own
        return both | {k: joined(base[k], own[k]) for k in own if isinstance(own[k], dict) and k in base}

    parse_config(joined(tomllib.loads(CONFIG), tomllib.loads(first_block(PAGES[page])[1])), page)


@pytest.mark.parametrize("page", {first_command(page): page for page in pages_in("sh", quick=True)}.values())
def test_a_quick_command_runs(page: str, workplace: Path) -> None:
    """Forked, except for one page (forked_processes.py). A command of several pages runs once."""
    command = prepare(first_command(page))
    program, *words = shlex.split(command)
    assert program == "oblr-megatron"
    run(["bash", "-c", command] if page == "first_run" else [sys.executable, "-m", "oblr_megatron.cli", *words])


@pytest.mark.nightly
@pytest.mark.parametrize("page", pages_in("sh", quick=False))
def test_a_command_runs(page: str, workplace: Path) -> None:
    run(["bash", "-c", prepare(first_command(page))])


@pytest.mark.nightly
@pytest.mark.parametrize("page", [*pages_in("python"), "first_run"])
def test_a_block_of_python_runs(page: str, workplace: Path) -> None:
    run([sys.executable, "-c", first_block(PAGES[page], "python")[1]])
