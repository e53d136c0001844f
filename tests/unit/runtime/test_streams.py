"""A command goes on when the reader of its output goes away. Real processes, pipes and terminals."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, sys, threading, warnings
from pathlib import Path
from oblr_megatron.errors import RunError
from oblr_megatron.runtime.command_line import guarded
from oblr_megatron.runtime.stopping import _print

def by_thread(text):
    thread = threading.Thread(target=print, args=(text,), kwargs={{"flush": True}})
    thread.start()
    thread.join()

WRITERS = {{
    "print": lambda text: print(text, flush=True),
    "unflushed": print,
    "large": lambda text: print(text * 100000, flush=True),
    "error": lambda text: print(text, file=sys.stderr, flush=True),
    "warning": warnings.warn,
    "logging": logging.getLogger("x").warning,
    "a signal's line": _print,
    "thread": by_thread,
    "descriptor": lambda text: (print(text, flush=True), os.write(1, text.encode())),
}}

def command():
    print("ready", flush=True)
    sys.stdin.read()  # until the reader has gone
    for step in range(3):
        WRITERS[{writer!r}](f"step {{step}}")
    Path({done!r}).write_text("saved")
    if {fails}:
        raise RunError("the reason")
    return 0

sys.exit(guarded(command))
"""
WRITERS = ("print", "unflushed", "large", "error", "warning", "logging", "a signal's line", "thread", "descriptor")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("console", ["pipe", "terminal"])
def test_a_reader_that_goes_away_ends_nothing(writer: str, fails: bool, console: str, tmp_path: Path) -> None:
    read, write = os.pipe() if console == "pipe" else pty.openpty()
    done = tmp_path / "done"
    code = SCRIPT.format(writer=writer, done=str(done), fails=fails)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=write, stderr=write) as process:
        os.close(write)
        assert os.read(read, 5) == b"ready"
        os.close(read)
        process.communicate(timeout=100)
    assert done.read_text() == "saved" and process.returncode == int(fails)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_read_is_all_and_in_order(unbuffered: str) -> None:
    code = (
        "import sys; from oblr_megatron.runtime.command_line import guarded\n"
        "guarded(lambda: [print(n, '\\u2713', flush=True) or print(n, file=sys.stderr) for n in range(3)] and 0)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=True
    )
    assert done.stdout.decode().split("\n") == [line for n in range(3) for line in (f"{n} \\u2713", str(n))] + [""]
