"""The launcher's log, and its wait for the first node. tests/e2e/test_launch.py starts launchers."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from oblr_megatron.runtime import launch
from oblr_megatron.runtime.launch import Forward, _Log
from tests.ports import free_port


class Joins:
    """As torchrun's keep-alive timer, when its own thread is the last to hold it."""

    def __del__(self) -> None:
        raise RuntimeError("cannot join current thread")


def test_what_python_cannot_raise_is_in_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    log = _Log(tmp_path)
    Joins()
    assert capfd.readouterr().err == ""
    log.keep("a rank failed")
    assert "cannot join current thread" in (tmp_path / "logs" / "launcher.log").read_text()


def joined(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    began: Callable[[], object] = lambda: None,
) -> tuple[int, str]:
    """Launch a second node with a torchrun that fails, after it called `began`: (status, error)."""

    def run(options: Any) -> None:
        began()
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(logging.root.manager, "loggerDict", {})
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.utils._matches_machine_hostname", lambda host: False)
    options = ["--nnodes", "2", "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    status = launch._torchrun([*options, "script.py"], Forward())
    return status, capsys.readouterr().err


def test_a_first_node_that_starts_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, events = free_port(), list[str]()

    def listen() -> None:
        time.sleep(1.5)
        events.append("listens")
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()

    first = threading.Thread(target=listen)
    first.start()
    joined(port, monkeypatch, capsys, lambda: events.append("begins"))
    first.join()
    assert events == ["listens", "begins"]


def test_a_first_node_that_never_answers_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "MEET_S", 1.0)
    port = free_port()
    status, error = joined(port, monkeypatch, capsys)
    assert status == 1 and error.startswith(f"error: the launchers cannot meet at 127.0.0.1:{port}: The connection")
