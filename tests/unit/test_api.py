"""How the API reads its command's output. tests/e2e/test_python_api.py covers whole runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron import api
from oblr_megatron.config import load_config, parse_config
from oblr_megatron.errors import UserError

HELPER = """
import subprocess, sys
task = subprocess.Popen(["sh", "-c", "sleep 20; touch done"], stdin=subprocess.DEVNULL)
print(task.pid, flush=True)
sys.stdout.buffer.write(b"half \\xff line\\r\\n")
sys.stdout.flush()
print("error: no such file", file=sys.stderr)
sys.exit(2)
"""


def test_a_background_process_does_not_hold_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "STARTER", HELPER)
    with pytest.raises(UserError, match=r"^no such file$"):
        api._run(["train"])
    held, half = capsys.readouterr().out.splitlines()
    try:
        assert half == "half \N{REPLACEMENT CHARACTER} line"
        assert not (tmp_path / "done").exists(), "the API waited for the background process"
    finally:
        os.kill(int(held), signal.SIGKILL)


@pytest.mark.parametrize("name", ["seed", "reward.v2", "a b", "a[1]", ""])
def test_a_name_that_the_command_would_read_otherwise_is_refused(name: str) -> None:
    with pytest.raises(UserError):
        api.evaluate("model", data={name: "rows.jsonl"})


def test_arguments_of_another_type_are_refused() -> None:
    wrong: Any = "config.toml"
    for call, named in (
        (lambda: api.train(wrong), "config is a str"),
        (lambda: api.evaluate("model", wrong), "config is a str"),
        (lambda: api.evaluate("model", data=wrong), "data is a str"),
    ):
        with pytest.raises(UserError, match=named):
            call()


def test_all_lines_of_a_command_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than one read, and a last line without an end."""
    monkeypatch.setattr(api, "STARTER", "for number in range(40_000): print(number)\nprint('end', end='')")
    api._run([])
    assert capsys.readouterr().out == "".join(f"{number}\n" for number in range(40_000)) + "end"


@pytest.mark.parametrize("named", [False, True])
def test_a_reward_that_the_config_leaves_out_stays_open(named: bool, tmp_path: Path) -> None:
    """Tasks of reasoning-gym then score themselves, as in the command."""
    given = {"reward": {"name": "math"}} if named else {}
    config = parse_config({"run_dir": "run", "model": {"path": "m"}, "data": {"train": "rows.jsonl"}} | given)
    read = load_config(Path(api._saved(config, str(tmp_path))))
    assert ("name" in read.reward.model_fields_set) is named and read.reward.name == "math"
