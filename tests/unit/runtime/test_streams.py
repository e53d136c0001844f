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


@pytest.mark.parametrize(
    ("writer", "fails"),
    [*((writer, False) for writer in WRITERS), ("print", True), ("error", True)],  # either stream is lost before
)
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


CONSOLE = """
import subprocess, sys
from oblr_megatron.observe.console import open_display, progress
from oblr_megatron.runtime.command_line import guarded

def command():
    with open({written!r}, "w") as file:
        open_display(3).message("step 1/3  " + "x" * 150 + " \\u2713")
        with progress("rows", 3) as advance:
            advance(3)
        subprocess.run(["echo", "from a child"])
        print("to standard error", file=sys.stderr)
        file.write("own")
    return 0

sys.exit(guarded(command))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("source", "shell", "terminal", "environment"),
    [
        ("nxp-imx/mfgtools#434, a file", "", False, {}),
        ("a terminal", "", True, {"TERM": "xterm-256color"}),
        ("a8m/pb#82, TERM=dumb", "", True, {"TERM": "dumb"}),
        ("mhx/dwarfs#20, an empty environment", "", True, {"TERM": ""}),
        ("ducaale/xh#114, NO_COLOR", "", True, {"TERM": "xterm-256color", "NO_COLOR": "1"}),
        ("xetys/hetzner-kube#26, a narrow terminal", "", True, {"TERM": "xterm", "COLUMNS": "40", "LINES": "5"}),
        ("alexjc/neural-enhance#199, AnswerDotAI/fastprogress#21", "", True, ASCII | {"TERM": "xterm"}),
        ("the same, a file", "", False, ASCII),
        ("streamlink/streamlink#6197", ">&-", False, {}),
        ("vectorize-io/hindsight#4580", "<&-", False, {}),
        ("pixelb/crudini#82, all closed", "<&- >&- 2>&-", False, {}),
    ],
)
def test_consoles(source: str, shell: str, terminal: bool, environment: dict[str, str], tmp_path: Path) -> None:
    """A line is whole on every console; only a terminal that can do it gets a progress bar, colourless if asked."""
    code, kept = CONSOLE.format(written=str(tmp_path / "written")), {"PATH": os.environ["PATH"]}
    command = ["sh", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, code]
    read, write = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(command, stdout=write, stderr=write, env=kept | environment) as process:
        os.close(write)
        output = b""
        while chunk := _read(read):
            output += chunk
    os.close(read)
    text = output.decode()
    assert process.returncode == 0, text
    assert (tmp_path / "written").read_text() == "own", source
    mark = "\\u2713" if "LC_ALL" in environment else "\u2713"
    assert (f"step 1/3  {'x' * 150} {mark}" in text, "from a child" in text) == (">" not in shell,) * 2, source
    assert ("to standard error" in text) == ("2>" not in shell)
    drawn = environment.get("TERM", "").startswith("xterm")
    assert ("\x1b[" in text) == drawn and ("rows" in text) == drawn, source
    assert "NO_COLOR" not in environment or "\x1b[3" not in text


def _read(console: int) -> bytes:
    try:
        return os.read(console, 1 << 16)
    except OSError:  # the other end of the terminal is closed
        return b""


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


def test_a_full_disk_loses_lines_of_the_console_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from oblr_megatron.runtime.command_line import guarded\n"
        f"guarded(lambda: [print(n, flush=True) for n in range(3)] and Path({str(tmp_path / 'done')!r}).touch() or 0)"
    )
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=True, timeout=100)
    assert (tmp_path / "done").exists()
