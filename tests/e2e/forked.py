"""Run commands and whole training runs in forked processes, which saves the seconds of imports per process.

Users start `run(torchrun(...))` of conftest.py. Here forked ranks call `main` directly, without the launcher and a new
interpreter. Their engines are forked as well (forked_processes.py). Reward workers and files are the same.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import torch.distributed as dist

from oblr_megatron import cli, step_loop
from tests.distributed.launch import run_ranks
from tests.e2e.conftest import LIMIT_S, ROOT
from tests.e2e.forked_processes import fork_keeper

CONFIG = "examples/tiny_cpu/config.toml"
Main = Callable[[list[str]], int]


def forked(ranks: int, arguments: list[str], **variables: str) -> CompletedProcess[str]:
    """Like `run(torchrun(ranks, arguments))`, with these environment variables; the status is the ranks' maximum.

    Raises:
        RankError: a rank raised an exception, was killed, or passed the deadline.
    """
    return call_forked(step_loop.main, ranks, [CONFIG, *arguments], variables)


def forked_cli(arguments: list[str], **variables: str) -> CompletedProcess[str]:
    """Like `run([python, "-m", "oblr_megatron.cli", *arguments])`."""
    return call_forked(cli.main, 1, arguments, variables)


def forked_and_signalled(lines: int, file: Path, number: int, arguments: list[str]) -> CompletedProcess[str]:
    """Like `forked_cli`; the command gets the signal `number` once the file has `lines` lines."""
    return call_forked(_signalled, 1, [str(lines), str(file), str(number), *arguments], {})


def _signalled(arguments: list[str]) -> int:
    lines, file, number = int(arguments[0]), Path(arguments[1]), int(arguments[2])

    def send() -> None:
        while not (file.exists() and file.read_bytes().count(b"\n") >= lines):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    return cli.main(arguments[3:])


def run_script(arguments: list[str]) -> int:
    """Like `python SCRIPT ARGUMENTS`; for `call_forked`."""
    sys.argv, script = arguments, arguments[0]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    return 0


def call_forked(main: Main, ranks: int, arguments: list[str], variables: dict[str, str]) -> CompletedProcess[str]:
    """`main(arguments)` on forked ranks, from the repository's root; `main` must be picklable by name."""
    with TemporaryDirectory() as directory:
        statuses = run_ranks(_rank, ranks, main, arguments, variables, directory, deadline_s=LIMIT_S, first=fork_keeper)
        said = [
            "".join((Path(directory) / f"{name}{rank}").read_text() for rank in range(ranks)) for name in ("out", "err")
        ]
    return CompletedProcess(arguments, max(statuses), *said)


def _rank(main: Main, arguments: list[str], variables: dict[str, str], directory: str) -> int:
    """Run one rank. Its output and that of its child processes go to the rank's own files."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(Path(directory) / f"{name}{rank}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(ROOT)
    os.environ |= variables | {"OMP_NUM_THREADS": "1"}
    if world_size == 1:
        dist.destroy_process_group()  # a single rank runs without torchrun
    else:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {key: str(value) for key, value in numbers.items()}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks have done their rendezvous
    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
