"""A fork server dies, hangs, or cannot fork: it is started or asked once more, and a second failure is an error.

Not covered: what workers leave behind (test_children.py).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from oblr_megatron.errors import DeadlineError, RunError
from oblr_megatron.processes import client
from oblr_megatron.processes.client import ForkServer, Worker
from tests.unit.processes.conftest import interrupted
from tests.unit.processes.test_pool import wait_until_gone

HANGS = 1000
MODULE = f"""
import errno, os, time
from pathlib import Path

NOTES = Path(__file__).with_suffix(".notes")
FORK = os.fork


def fork():
    left = int(NOTES.read_text())
    if left == 0:
        return FORK()
    NOTES.write_text(str(left - 1))
    if left == {HANGS}:
        time.sleep(600)
    if left > 100:
        os._exit(7)
    raise OSError(errno.EAGAIN, "no process is left")


def make(word):
    os.fork = fork
    print("imported", word)
    return lambda end: end.sendall(end.recv(100) + word.encode())


def broken(word):
    raise LookupError("a fault of the module")


def endless(word):
    time.sleep(600)
"""


def children() -> set[int]:
    """Process ids; other tests of this process may have left a fork server."""
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def started(directory: Path, failures: int = 0, name: str = "make", start_s: float = 120.0) -> Iterator[ForkServer]:
    """A fork server that fails its first forks. The number in NOTES says how often and how it fails."""
    (directory / "user.py").write_text(MODULE)
    (directory / "user.notes").write_text(str(failures))
    before = children()
    target, log = f"{directory}/user.py:{name}", directory / "logs" / "server.log"
    server = ForkServer(target, {"word": "b"}, what="the server", owner="rank 0", start_s=start_s, log=log)
    try:
        yield server
    finally:
        server.close()
        server.close()
        assert children() <= before, "nothing is left, not even a zombie"


def family(worker: Worker) -> tuple[int, int]:
    """Process ids of a worker's fork server and supervisor; the worker answers."""
    worker.socket.settimeout(60.0)
    own = psutil.Process(worker.pid)
    server, supervisor = own.parents()[:2]
    assert supervisor.ppid() == os.getpid()
    worker.socket.sendall(b"a")
    assert worker.socket.recv(2) == b"ab"
    worker.socket.close()
    return server.pid, supervisor.pid


def test_what_its_processes_print_is_in_the_log(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        family(server.fork())
    assert "imported b" in (tmp_path / "logs" / "server.log").read_text()


def test_one_that_died_is_started_again(tmp_path: Path) -> None:
    with started(tmp_path) as server:
        first = family(server.fork())
        os.kill(first[0], signal.SIGKILL)
        second = family(server.fork())
        os.kill(second[1], signal.SIGKILL)
        wait_until_gone(second[1])
        third = family(server.fork())
        assert len({*first, *second, *third}) == 6
        assert not psutil.pid_exists(first[1]) and not psutil.pid_exists(second[1]), "they are reaped"


def test_one_that_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path) as server:
        worker = server.fork()
        first = psutil.Process(worker.pid).parents()[0]
        monkeypatch.setattr(client, "REQUEST_S", 0.5)
        server._control.settimeout(0.5)
        first.suspend()
        server.kill(worker)
        wait_until_gone(worker.pid)
        monkeypatch.undo()
        assert family(server.fork())[0] != first.pid


def test_one_whose_answer_was_not_awaited_is_started_again(tmp_path: Path) -> None:
    """Ctrl-C in `kill`: the answer would otherwise be taken for that of the next request."""
    with started(tmp_path) as server:
        worker = server.fork()
        first = psutil.Process(worker.pid).parents()[0]
        first.suspend()
        with interrupted(), pytest.raises(KeyboardInterrupt):
            server.kill(worker)
        wait_until_gone(worker.pid)
        assert family(server.fork())[0] != first.pid


def test_one_that_dies_twice_is_an_error(tmp_path: Path) -> None:
    with started(tmp_path, failures=102) as server:
        with pytest.raises(RunError, match=r"the server has ended; the end of .*server\.log"):
            server.fork()
        (tmp_path / "user.notes").write_text("0")
        family(server.fork())


def test_a_fork_that_fails_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    with started(tmp_path, failures=1) as server:
        own = family(server.fork())
        (tmp_path / "user.notes").write_text("2")
        with pytest.raises(RunError, match=f"the server cannot fork: {os.strerror(11)}"):
            server.fork()
        assert family(server.fork()) == own, "it goes on"


def test_the_error_of_an_import_is_shown(tmp_path: Path) -> None:
    with started(tmp_path, name="broken") as server, pytest.raises(RunError, match="a fault of the module"):
        server.fork()


def test_imports_that_take_too_long_are_an_error(tmp_path: Path) -> None:
    late = pytest.raises(DeadlineError, match=r"rank 0 waited 0\.5 s for the imports of the server")
    with started(tmp_path, name="endless", start_s=0.5) as server, late:
        server.fork()


def test_one_that_is_closed_starts_nothing(tmp_path: Path) -> None:
    """It is closed while another thread waits for a worker."""
    with started(tmp_path, failures=HANGS) as server:

        def close_at_the_fork() -> None:
            while (tmp_path / "user.notes").read_text() != str(HANGS - 1):
                time.sleep(0.01)
            server.close()

        closer = threading.Thread(target=close_at_the_fork)
        closer.start()
        with pytest.raises(RunError, match="has ended"):
            server.fork()
        closer.join()
