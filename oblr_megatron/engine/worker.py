"""The engine process: `python -m oblr_megatron.engine.worker SOCKET_FD PARENT_PID`, started by `engine.handle`.

vLLM's engine core runs in this process. Batches therefore depend only on the requests, and one signal ends the engine.
It ends with its parent, by the kernel's parent-death signal and at the end of the socket's stream. It ignores the
signals that ask a run to save and stop, which SLURM sends to every process of a job: the current step still needs it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from oblr_megatron.engine.channel import Call, Channel, PeerGone, Reply
from oblr_megatron.engine.core import EngineServer
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.engine.turns import inbox_of
from oblr_megatron.errors import DamagedError, RunError
from oblr_megatron.runtime.garbage import no_collection
from oblr_megatron.runtime.processes import die_with
from oblr_megatron.runtime.stopping import SIGNALS


def main(arguments: list[str]) -> int:
    """Receive the spec, start the engine, and answer calls until the trainer ends."""
    fd, parent = (int(argument) for argument in arguments)
    die_with(parent)
    outlive(SIGNALS)
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    try:
        spec: EngineSpec = channel.receive()
        server = _answer(channel, lambda: _start(spec))
        while server is not None:
            call = channel.receive()
            if not isinstance(call, Call):
                continue  # a request for a turn that came after its call had failed
            own = {"inbox": inbox_of(channel)} if call.method == "turns" else {}
            _answer(channel, partial(getattr(server, call.method), **call.arguments, **own))
    except PeerGone:
        pass
    return 0


def outlive(signals: Collection[signal.Signals]) -> None:
    """Ignore signals, in this process and in those that it starts.

    SIG_IGN covers threads that libraries have started already. The blocked mask is inherited, and also covers vLLM's
    worker processes, which set their own handlers. SIGKILL still ends them, and vLLM uses it.
    """
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def _start(spec: EngineSpec) -> EngineServer:
    from oblr_megatron.engine.plugin import register

    register()  # vLLM calls it only if the package is installed and VLLM_PLUGINS includes it
    with no_collection():  # vLLM collects at the end of the start
        return EngineServer(spec)


def _answer(channel: Channel, call: Callable[[], Any]) -> Any:
    """Run a call and send its value or its error. Returns the value, or None after an error.

    The values of an iterator are sent one by one, as they come.
    """
    try:
        value = call()
        if isinstance(value, Iterator):
            for part in value:
                channel.send(Reply(value=part, more=True))
            value = None
    except PeerGone:
        raise
    except RunError as error:
        channel.send(Reply(error=str(error), kind=DamagedError if isinstance(error, DamagedError) else RunError))
        return None
    except Exception as error:  # noqa: BLE001  any error of vLLM must reach the trainer, which waits for an answer
        traceback.print_exc()
        channel.send(Reply(error=f"{type(error).__name__}: {error}"))
        return None
    channel.send(Reply(value=None if isinstance(value, EngineServer) else value))
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
