"""Runs a call in a daemon thread, so that a call that hangs cannot keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")


def in_thread(call: Callable[[], Value], name: str) -> Future[Value]:
    """Start the call in a thread of this name. The future cannot be cancelled, so that a result can always be set."""
    future: Future[Value] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised again by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
