"""The newcomer's path: a config by `init`, and every command of the README as it is written, on the tiny model.

Not covered: `make`, `sbatch` (tests/e2e/test_slurm.py), and whether the numbers of the README still hold.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oblr_megatron.cli import main
from oblr_megatron.config import load_config
from oblr_megatron.errors import EXIT_USER
from tests.e2e.conftest import LIMIT_S, ROOT, environment, records
from tests.e2e.forked import forked_cli

SHORT = {"num_steps = 100": "num_steps = 2", "num_prompts = 32": "num_prompts = 8", "group_size = 8": "group_size = 4"}
IN_SHORT = {"num_steps=200": "num_steps=3"}
"""What is replaced in the config that `init` wrote and in the commands after it, to save time."""
OURS = re.compile(r"(starting|warning:|WARNING) .*")
"""What a command may say on standard error."""
COMMANDS = {"init", "train", "status", "report", "eval", "convert", "quantize", "plan"}
"""The README shows each of them."""


def test_a_run_of_a_config_by_init(tiny: Path, tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows and lengths fit the model; the run takes saved samples, so that it starts no engine."""
    out = tmp_path / "mine.toml"
    init = ["init", str(tiny / "model"), str(tiny / "train.jsonl"), "--out", str(out)]
    assert main(init) == 0
    assert f"oblr-megatron train {out}" in capsys.readouterr().out
    config = load_config(out)
    assert config.reward.name == "exact_match" and config.data.template == "{question}"
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (16, 48)
    text = out.read_text()
    assert main(init) == EXIT_USER and out.read_text() == text
    dry_run = forked_cli(["train", str(out), "--dry-run"])
    assert dry_run.returncode == 0, dry_run.stderr[-3000:]
    keys = [f"run_dir={tmp_path / 'run'}", "num_steps=1", "num_prompts=8", "group_size=4"]
    result = forked_cli(["train", str(out), *keys, "--replay", str(saved / "rollouts")])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [record["step"] for record in records(tmp_path / "run")] == [1]
    assert f"report {tmp_path / 'run' / 'report.html'}, model {tmp_path / 'run' / 'hf'}" in result.stdout


def readme_commands() -> Iterator[str]:
    """The lines of the README's blocks of shell, without comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from (line for text in block.splitlines() if (line := text.partition("#")[0].strip()))


@pytest.fixture
def workplace(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the files that the README's commands name."""
    (tmp_path / "MODEL_DIR").symlink_to(tiny / "model")
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copy(tiny / name, tmp_path)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_every_command_of_the_readme(workplace: Path) -> None:
    done = set()
    for line in readme_commands():
        program, *arguments = (word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word))
        if program != "oblr-megatron":
            assert program in (".", "make", "sbatch"), f"no test runs {line}"
            continue
        for long, short in IN_SHORT.items():
            arguments = [argument.replace(long, short) for argument in arguments]
        command = [sys.executable, "-m", "oblr_megatron.cli", *arguments]
        result = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert result.returncode == 0, f"{line}\n{result.stderr[-3000:]}"
        foreign = [said for said in result.stderr.splitlines() if not OURS.fullmatch(said)]
        assert foreign == [], line
        done.add(arguments[0])
        if arguments[0] == "init":
            config = Path("config.toml").read_text()
            for long, short in SHORT.items():
                assert long in config
                config = config.replace(long, short)
            Path("config.toml").write_text(config)
    assert done == COMMANDS
    assert Path("EVAL_DIR/figures.json").is_file() and Path("HF_DIR/model.safetensors").is_file()
