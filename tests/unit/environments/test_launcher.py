"""The process that forks dies, or cannot fork: it is started or asked once more, and a second failure is an error.

Not covered: episodes (tests/e2e/test_environments.py).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from oblr_megatron.config import parse_config
from oblr_megatron.environments import launcher as launching
from oblr_megatron.environments.launcher import Launcher, Process
from oblr_megatron.errors import RunError
from tests.tiny import make_tokenizer

TOKENIZER = """
class Tokenizer:
    def from_pretrained(*args):
        return None
"""  # a real one takes seconds to import, for each process
HANGS = 1000
FUNCTION = f"""
import errno, os, sys, time
from pathlib import Path

HANGS = {HANGS}

NOTES = Path(__file__).with_suffix(".notes")
FORK = os.fork


def fork():
    NOTES.with_suffix(".torch").write_text(str("torch" in sys.modules))
    left = int(NOTES.read_text())
    if left == 0:
        return FORK()
    NOTES.write_text(str(left - 1))
    if left == HANGS:
        time.sleep(600)
    if left > 100:
        os._exit(7)
    raise OSError(errno.EAGAIN, "no process is left")


os.fork = fork


async def function(engine, prompt, seed):
    return None
"""


@pytest.fixture
def quick_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "quick_tokenizer.py").write_text(TOKENIZER)
    monkeypatch.syspath_prepend(tmp_path / "stubs")
    found = importlib.import_module("quick_tokenizer").Tokenizer
    monkeypatch.setattr(launching, "tokenizer_class", lambda model: found)
    yield
    del sys.modules["quick_tokenizer"]


def children() -> set[int]:
    """Process ids; other tests of this process may have left a fork server."""
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def launched(directory: Path, failures: int) -> Iterator[Launcher]:
    """A launcher with a process that fails its first forks. The number in NOTES says how often and how it fails."""
    (directory / "user.py").write_text(FUNCTION)
    (directory / "user.notes").write_text(str(failures))
    table = {
        "run_dir": str(directory / "run"),
        "model": {"path": str(directory / "model")},
        "data": {"train": "none", "chat_template": True, "chat_template_options": {"enable_thinking": False}},
        "rollout": {"environment": f"{directory}/user.py:function", "max_response_tokens": 16},
        "reward": {"name": "environment"},
    }
    before = children()
    launcher = Launcher(parse_config(table), vocab_size=37, index=0, owner="rank 0")
    try:
        yield launcher
    finally:
        launcher.close()
        launcher.close()
        assert children() <= before, "nothing is left, not even a zombie"


def lives(process: Process, launcher: Launcher) -> bool:
    """Whether a process is the child of the one that forks, and runs."""
    return psutil.Process(process.pid).ppid() == launcher._popen.pid


def test_the_process_needs_no_torch(tmp_path: Path) -> None:
    """It has the class of the model's tokenizer from the rank; transformers' search for it would import torch."""
    make_tokenizer().save_pretrained(tmp_path / "model")
    with launched(tmp_path, failures=0) as launcher:
        assert lives(launcher.fork(), launcher)
    assert (tmp_path / "user.torch").read_text() == "False"


@pytest.mark.usefixtures("quick_imports")
def test_the_process_gets_the_options_of_the_chat_template(tmp_path: Path) -> None:
    with launched(tmp_path, failures=0) as launcher:
        assert launcher._setup.template_options == {"enable_thinking": False}


@pytest.mark.usefixtures("quick_imports")
def test_a_process_that_died_is_started_again(tmp_path: Path) -> None:
    with launched(tmp_path, failures=0) as launcher:
        first = launcher.fork()
        assert lives(first, launcher)
        died = launcher._popen.pid
        os.kill(died, signal.SIGKILL)
        second = launcher.fork()
        assert lives(second, launcher) and launcher._popen.pid != died
        assert not psutil.pid_exists(died), "it is reaped"
        launcher._popen.kill()
        launcher._popen.wait()  # the request finds a closed socket
        assert lives(launcher.fork(), launcher)


@pytest.mark.usefixtures("quick_imports")
def test_a_process_that_dies_twice_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, failures=102) as launcher:
        with pytest.raises(RunError, match=r"the environment process has ended; the end of .*environment-0\.log"):
            launcher.fork()
        (tmp_path / "user.notes").write_text("0")
        assert lives(launcher.fork(), launcher)


@pytest.mark.usefixtures("quick_imports")
def test_a_fork_that_fails_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PAUSE_SECONDS", 0.01)
    with launched(tmp_path, failures=1) as launcher:
        pid = launcher._popen.pid
        assert lives(launcher.fork(), launcher)
        (tmp_path / "user.notes").write_text("2")
        with pytest.raises(RunError, match=f"the environment process cannot fork: {os.strerror(11)}"):
            launcher.fork()
        assert lives(launcher.fork(), launcher) and launcher._popen.pid == pid, "it goes on"


@pytest.mark.usefixtures("quick_imports")
def test_a_launcher_that_is_closed_starts_nothing(tmp_path: Path) -> None:
    """It is closed while another thread waits for a process."""
    with launched(tmp_path, failures=HANGS) as launcher:

        def close_at_the_fork() -> None:
            while (tmp_path / "user.notes").read_text() != str(HANGS - 1):
                time.sleep(0.01)
            launcher.close()

        closer = threading.Thread(target=close_at_the_fork)
        closer.start()
        with pytest.raises(RunError, match="has ended"):
            launcher.fork()
        closer.join()
