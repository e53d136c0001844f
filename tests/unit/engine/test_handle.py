"""Loss of an engine that the kernel cannot end, and of its log. Real engines: tests/e2e/test_rollout_failures.py."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest

from oblr_megatron.engine.channel import Reply
from oblr_megatron.engine.handle import GRACE_SECONDS, VllmEngine
from oblr_megatron.errors import EngineLostError, RunError
from oblr_megatron.formatting import log_tail

NO_PROCESS = 2**22 + 1  # above the largest process id


def unkillable(log: Path) -> tuple[VllmEngine, list[str]]:
    """An engine with a process that a hanging driver holds, and the names of its parts that are closed."""
    closed: list[str] = []

    def wait(seconds: float | None = None) -> None:
        assert seconds is not None and seconds <= GRACE_SECONDS, "nothing may wait for ever"
        raise TimeoutExpired("engine", seconds)

    engine = object.__new__(VllmEngine)
    parts = {name: SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("_channel", "_writer")}
    parts["buffer"] = SimpleNamespace(close=lambda: closed.append("buffer"))
    process = SimpleNamespace(pid=NO_PROCESS, returncode=None, kill=lambda: None, wait=wait)
    vars(engine).update(parts, _process=process, _lost=None, _closed=False, log=log, owner="rank 0")
    vars(engine)["spec"] = SimpleNamespace(name="engine 0")
    return engine, closed


def test_an_engine_that_cannot_be_reaped_is_lost_all_the_same(tmp_path: Path) -> None:
    engine, closed = unkillable(tmp_path / "engine-0.log")
    error = engine._too_late("64 samples", 5.0)
    assert isinstance(error, EngineLostError) and closed == ["_channel", "_writer", "buffer"]
    with pytest.raises(EngineLostError, match="64 samples"):
        engine._check_lost()


def test_a_log_that_is_gone_does_not_hide_the_loss(tmp_path: Path) -> None:
    engine, _ = unkillable(tmp_path / "removed.log")
    error = engine._died("64 samples")
    assert isinstance(error, EngineLostError) and "waited for 64 samples" in str(error)
    assert "removed.log cannot be read" in str(error)


@pytest.mark.parametrize(("ranks", "ready", "shown"), [(2, False, True), (2, True, False), (1, False, False)])
def test_the_log_is_shown_where_another_process_knows_why_a_start_failed(
    ranks: int, ready: bool, shown: bool, tmp_path: Path
) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("ValueError: 3 GiB are free\n")
    engine, _ = unkillable(log)
    reply = Reply(error="Exception: see stack trace for root cause", kind=RunError, number=1)
    channel = SimpleNamespace(receive=lambda deadline, alive: reply)
    spec = SimpleNamespace(name="engine 0", device="cpu", tensor_parallel_size=ranks)
    vars(engine).update(_ready=ready, _number=1, _channel=channel, spec=spec)
    with pytest.raises(RunError, match="waited for the start: Exception: see stack trace") as caught:
        engine._receive("the start", 0.0, 60.0)
    assert ("3 GiB are free" in str(caught.value)) == shown


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    with log.open("wb") as file:
        file.truncate(2**28)
        file.seek(2**28)
        file.write(b"".join(b"\nline %d" % number for number in range(20)))
    tracemalloc.start()
    try:
        tail, (_, peak) = log_tail(log), tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tail.splitlines()[1:] == [f"    line {number}" for number in range(5, 20)] and peak < 2**20
