"""Identities of processes, and ranks that end with a launcher that is gone already."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oblr_megatron.runtime.processes import LAUNCHER, TORCHRUN, alive, children_of, identity, lost_rank, started_at

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
        (lambda: identity(os.getpid()), True),
        (lambda: f"{os.getpid()}:1", False),  # the launcher's id belongs to another process now
        (lambda: "1:1", False),  # the launcher was killed, and init adopted the rank
        (lambda: None, True),  # a plain torchrun
    ],
)
def test_a_rank_ends_where_its_launcher_has_ended(given: object, goes_on: bool) -> None:
    value = given()  # type: ignore[operator]
    environment = os.environ | {TORCHRUN: "1"} | ({} if value is None else {LAUNCHER: value})
    done = subprocess.run([sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ("on\n" if goes_on else "")


def test_a_process_that_torchrun_did_not_start_goes_on() -> None:
    environment = {name: value for name, value in os.environ.items() if name != TORCHRUN} | {LAUNCHER: "1:1"}
    done = subprocess.run([sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "on\n"


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
