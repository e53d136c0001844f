"""Calls in daemon threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from oblr_megatron.runtime.threads import in_thread


def test_results_and_errors_pass_and_a_hanging_call_keeps_no_process_alive() -> None:
    never = threading.Event()

    def fails() -> None:
        raise OSError("no answer")

    def waited(call: Callable[[], object]) -> asyncio.Future[object]:
        return asyncio.wrap_future(in_thread(call, "of a test"))

    async def all_three() -> None:
        hanging = waited(never.wait)
        assert await waited(lambda: 7) == 7
        with pytest.raises(OSError, match="no answer"):
            await waited(fails)
        hanging.cancel()  # the result that comes later must find nothing broken

    asyncio.run(all_three())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "of a test")
    assert thread.daemon
    never.set()
    thread.join(60)
    assert not thread.is_alive()
