"""Identities of processes, and ranks that end with a launcher that is gone already."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oblr_megatron.runtime.processes import (
    LAUNCHER,
    TORCHRUN,
    alive,
    children_of,
    identity,
    lost_rank,
    python_module,
    started_at,
)

RANK = "from oblr_megatron.runtime.processes import die_with_launcher\ndie_with_launcher()\nprint('on', flush=True)\n"


def test_an_identity_ends_with_its_process() -> None:
    assert alive(identity(os.getpid()))
    with subprocess.Popen(["sleep", "60"]) as child:
        name = identity(child.pid)
        assert alive(name) and child.pid in children_of(os.getpid())
        assert not alive(f"{child.pid}:1"), "an id of another process that had the same number"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(name), "a zombie"
    assert not alive(name)
    with pytest.raises(ProcessLookupError):
        identity(child.pid)


def test_started_at() -> None:
    before = time.time()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert before - 0.05 <= started_at(child.pid) <= time.time() + 0.05
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [
        (lambda: {TORCHRUN: "1", LAUNCHER: identity(os.getpid())}, True),
        (lambda: {TORCHRUN: "1", LAUNCHER: f"{os.getpid()}:1"}, False),  # its id belongs to another process now
        (lambda: {TORCHRUN: "1", LAUNCHER: "1:1"}, False),  # it was killed, and init adopted the rank
        (lambda: {TORCHRUN: "1"}, True),  # a plain torchrun
        (lambda: {LAUNCHER: "1:1"}, True),  # torchrun did not start this process
    ],
)
def test_a_rank_ends_where_its_launcher_has_ended(given: Callable[[], dict[str, str]], goes_on: bool) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in (TORCHRUN, LAUNCHER)}
    done = subprocess.run([sys.executable, "-c", RANK], env=kept | given(), capture_output=True, text=True, check=True)
    assert done.stdout == ("on\n" if goes_on else "")


def test_a_lost_rank_is_missing_among_the_launchers_children(tmp_path: Path) -> None:
    """Three ranks of one parent; one of them is killed. The parent asks on behalf of a child."""
    program = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen(['sleep', '60'], env=os.environ | {'LOCAL_RANK': str(n)}) for n in range(2)]\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        "ask = 'from oblr_megatron.runtime.processes import lost_rank; print(lost_rank())'\n"
        "asking = os.environ | {'LOCAL_RANK': '2', 'LOCAL_WORLD_SIZE': '3', 'TORCHELASTIC_RUN_ID': '1'}\n"
        "def answer():\n"
        "    return subprocess.run([sys.executable, '-c', ask], env=asking, capture_output=True, text=True).stdout\n"
        "def given(rank):\n"
        "    return b'LOCAL_RANK' in open(f'/proc/{rank.pid}/environ', 'rb').read()\n"
        "while not all(map(given, ranks)):\n"
        "    pass  # until exec has given a rank its environment\n"
        "print(answer())\n"
        "ranks[0].kill()\n"
        "os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)  # a zombie, as the launcher sees it\n"
        "print(answer())\n"
        "for each in (*ranks, other):\n    each.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert not lost_rank({})


@pytest.mark.parametrize("flag", [[], ["-P"]])
@pytest.mark.parametrize("path", ["", "here", "elsewhere"])
def test_the_current_directory_comes_last(flag: list[str], path: str, tmp_path: Path) -> None:
    """A PYTHONPATH that names it is a user's wish, and stays."""
    (tmp_path / "start.py").write_text(
        "import sys; from oblr_megatron.runtime.processes import directory_last; directory_last(); print(sys.path)"
    )
    root = str(Path(__file__).parents[3])
    given = {"": root, "here": f"{tmp_path}:{root}", "elsewhere": f"/nowhere:{root}"}[path]
    command = [sys.executable, *flag, "-c", (tmp_path / "start.py").read_text()]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": given}, capture_output=True, text=True, check=True)
    places = ast.literal_eval(done.stdout)
    assert places.count(str(tmp_path)) == 1 and "" not in places
    assert places.index(str(tmp_path)) == (0 if path == "here" else len(places) - 1)


def test_files_in_the_current_directory_hide_no_module(tmp_path: Path) -> None:
    for name in ("token", "random", "json", "signal", "runpy", "socket", "ctypes", "contextlib"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the file {name} of the user')")
    command = [*python_module("oblr_megatron.runtime.rank"), "-m", "platform"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Linux" in done.stdout, done.stderr
