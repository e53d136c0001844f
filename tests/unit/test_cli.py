"""The command line: common mistakes end before torch is imported, every option has help, versions are printed.

The messages themselves are covered by the tests of config, hf_dir, layout and sources. Not covered: how long a refusal
takes; what it imports decides that.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from oblr_megatron.cli import main, make_parser
from oblr_megatron.errors import EXIT_USER, DeadlineError, UserError
from oblr_megatron.runtime.command_line import guarded, reason_of
from tests.tiny import make_hf_dir

CALL = """
import contextlib, io, json, sys
from oblr_megatron.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(arguments)
    found.append([status, said.getvalue(), "torch" in sys.modules, "transformers" in sys.modules])
print(json.dumps(found))
"""
ROWS = '{"question": "1+2=", "answer": "3"}\n'
CONFIG = """
run_dir = "run"
num_prompts = 4
[model]
path = "model"
[data]
train = "rows.jsonl"
max_prompt_tokens = 16
[rollout]
max_response_tokens = 16
"""
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no command": ([], "COMMAND"),
    "unknown command": (["trian"], "trian"),
    "unknown option": (["train", "c.toml", "--resum-e"], "--resum-e [command line]. Fix: see `oblr-megatron train --"),
    "no config": (["train", "none.toml"], "none.toml"),
    "unknown key": (["train", "c.toml", "algo.baselin=rloo"], "algo.baselin"),
    "wrong type": (["train", "c.toml", "num_steps=abc"], "'abc'"),
    "out of bounds": (["train", "c.toml", "optimizer.lr=-1"], "-1"),
    "contradiction": (["train", "c.toml", "num_prompts=6"], "6"),
    "no ranks": (["train", "c.toml", "--nproc-per-node", "0"], "--nproc-per-node"),
    "ranks that are no number": (["train", "c.toml", "--nproc-per-node", "many"], "many"),
    "nodes without a dry run": (["train", "c.toml", "--nnodes", "2"], "--nnodes and --gpu-memory-gb need --dry-run"),
    "memory that is none": (["train", "c.toml", "--dry-run", "--gpu-memory-gb", "nan"], "nan"),
    "ranks that do not divide": (["train", "c.toml", "parallel.tensor_model_parallel_size=3"], "3"),
    "no port": (["train", "c.toml", "--nproc-per-node", "2", "--master-port", "99999"], "99999"),
    "port 0": (["train", "c.toml", "--nproc-per-node", "2", "--master-port", "0"], "'0' is not a whole number"),
    "no model": (["train", "c.toml", "model.path=none"], "none"),
    "no model, dry": (["train", "c.toml", "model.path=none", "--dry-run"], "none"),
    "no reward": (["train", "c.toml", "reward.name=none"], "'none'"),
    "responses that do not fit": (["train", "c.toml", "rollout.max_response_tokens=900"], "900"),
    "no data": (["train", "c.toml", "data.train=none.jsonl"], "none.jsonl"),
    "no saved samples": (["train", "c.toml", "--replay", "none"], "none"),
    "no file of a pattern": (["train", "c.toml", "data.train=none*.jsonl"], "none*.jsonl"),
    "no held-out set": (["train", "c.toml", "evaluate.data.a=none.jsonl"], "none.jsonl"),
    "run_dir in use": (["train", "c.toml", "run_dir=model"], "model"),
    "eval of no model": (["eval", "--model", "none"], "none"),
    "eval without data": (["eval", "--model", "model"], "--data"),
    "eval of no data": (["eval", "--model", "model", "--data", "none.jsonl"], "none.jsonl"),
    "eval with a wrong key": (
        ["eval", "--model", "model", "--data", "rows.jsonl", "evaluate.top_p=2"],
        "evaluate.top_p",
    ),
    "eval of no task": (["eval", "--model", "model", "--data", "reasoning_gym:"], "names no task"),
    "init of no task": (["init", "model", "reasoning_gym:"], "names no task"),
    "convert of nothing": (["convert", "to-hf", "none", "out"], "none"),
    "convert to what exists": (["convert", "to-megatron", "model", "model"], "model"),
    "serve without a model": (["serve"], "--model"),
    "serve no model": (["serve", "--model", "none"], "none"),
    "serve on no port": (["serve", "--model", "model", "--port", "99999"], "99999"),
    "init of no model": (["init", "none", "rows.jsonl"], "none"),
    "init over a file": (["init", "model", "rows.jsonl", "--out", "c.toml"], "c.toml"),
    "init of another kind of file": (["init", "model", "rows.jsonl", "--out", "x.json"], "end in .toml"),
    "init of no data": (["init", "model", "none.jsonl"], "none.jsonl"),
    "report of no run": (["report", "none"], "none"),
}


def test_mistakes_end_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    end_in_one_line(MISTAKES, tmp_path)


def end_in_one_line(mistakes: dict[str, tuple[list[str], str]], tmp_path: Path) -> None:
    """One process makes all of them, and checks after each whether torch was imported."""
    make_hf_dir(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "c.toml").write_text(CONFIG)
    before = sorted(tmp_path.rglob("*"))
    calls = json.dumps([arguments for arguments, _ in mistakes.values()])
    done = subprocess.run(
        [sys.executable, "-c", CALL, calls], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, (_, named)), (status, said, torch, transformers) in zip(
        mistakes.items(), json.loads(done.stdout), strict=True
    ):
        assert status == EXIT_USER, f"{name}: {said}"
        assert said.startswith("error: ") and said.count("\n") == 1 and named in said, f"{name}: {said}"
        assert not torch and not transformers, f"{name} imported torch"
    assert sorted(tmp_path.rglob("*")) == before


def options(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.Action]]:
    """Every option and argument of a parser and its subcommands. Studies add theirs when they parse."""
    with suppress(UserError):  # something is missing
        parser.parse_known_args([])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helped = {choice.dest for choice in action._choices_actions if choice.help}
            assert helped == set(action.choices), f"{name}: a subcommand has no help"
            for command, inner in action.choices.items():
                yield from options(inner, f"{name} {command}")
        else:
            yield f"{name} {'/'.join(action.option_strings) or action.dest}", action


def test_every_option_has_help() -> None:
    found = dict(options(make_parser(), "oblr-megatron"))
    assert len(found) > 70 and sum(name.split()[1] in ("plan", "quantize", "study") for name in found) > 45
    assert [name for name, action in found.items() if not action.help] == []


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name for name, _ in lines} == {"oblr-megatron", "megatron-core", "vllm", "torch"}
    assert all(version[0].isdigit() for _, version in lines)


def test_a_full_disk_is_one_line_and_other_errors_of_files_keep_their_traceback(capsys) -> None:
    def raises(number: int) -> int:
        raise OSError(number, os.strerror(number), "/run/config.toml")

    assert guarded(lambda: raises(errno.EDQUOT)) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 0: cannot write /run/config.toml: ") and "Fix: " in said
    with pytest.raises(OSError, match="Input/output"):
        guarded(lambda: raises(errno.EIO))


def test_a_rank_that_waited_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    def gives_up() -> int:
        raise DeadlineError("rank 0", "the other ranks", 20.0)

    assert guarded(gives_up) == 1
    assert capsys.readouterr().err.count("rank 0") == 1


def test_a_lost_rank_is_recognised_by_gloos_messages() -> None:
    waited = "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    assert reason_of(RuntimeError(waited)).startswith("waited 1800 s for another rank")
    reset = "[gloo/transport/tcp/pair.cc:547] Read error [::ffff:10.0.0.2]:4711: Connection reset by peer"
    assert reason_of(RuntimeError(reset)) == "lost another rank at 10.0.0.2: Connection reset by peer"
    assert reason_of(RuntimeError("shapes differ")) is None and reason_of(ValueError("Broken pipe")) is None


@pytest.mark.parametrize("launched", [False, True])
def test_a_path_without_permission_is_one_line_except_in_a_rank(
    launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests may run as root, so the error is made: pathlib's is_dir raises it where a directory may not be searched."""

    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def command() -> int:
        with monkeypatch.context() as inner:
            inner.setattr(Path, "stat", refuse)
            return int(Path("/np/m").is_dir())

    monkeypatch.setattr("oblr_megatron.runtime.command_line.launched", lambda: launched)
    if launched:
        with pytest.raises(PermissionError):
            guarded(command)
        return
    assert guarded(command) == EXIT_USER
    said = capsys.readouterr().err
    assert said == "error: no permission [/np/m]. Fix: give yourself access to it, or choose another path\n"
