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
from collections.abc import Collection
from contextlib import closing, suppress

from oblr_megatron.engine.channel import Channel, PeerGone, Reply
from oblr_megatron.engine.core import EngineServer, failure
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.errors import EXIT_OK, EXIT_RUN, RunError
from oblr_megatron.runtime.garbage import no_collection
from oblr_megatron.runtime.processes import die_with, directory_last
from oblr_megatron.runtime.stopping import SIGNALS


def main(arguments: list[str]) -> int:
    """Receive the spec, start the engine, and answer calls until the parent ends or the engine fails."""
    fd, parent = (int(argument) for argument in arguments)
    die_with(parent)
    directory_last()
    outlive(SIGNALS)
    os.set_inheritable(fd, False)
    with suppress(PeerGone), closing(Channel(socket.socket(fileno=fd))) as channel:
        serve(channel)
        return EXIT_RUN
    return EXIT_OK


def serve(channel: Channel) -> None:
    """Start the engine, and answer calls until it fails. A start that fails is answered, too, and nothing after it.

    Raises:
        PeerGone: the parent has ended.
    """
    spec: EngineSpec = channel.receive()
    try:
        engine = _start(spec)
    except Exception as error:  # noqa: BLE001  any error of vLLM must reach the parent, which waits for an answer
        channel.send(failure(error, kind=RunError))  # another start would fail the same way
        return
    channel.send(Reply())
    while not engine.failed:
        replies = engine.answer(channel.receive()) if channel.ready() or not engine.sampling else engine.step()
        for reply in replies:
            channel.send(reply)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
