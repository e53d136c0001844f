"""The fork server: a process that has imported a user's module, so that forking a worker takes milliseconds.

The supervisor, a child of the trainer process in its own session, forks it and waits. The fork server only forks and
kills on request (client.py):

    request                    answer
    FORK + a socket            8 bytes: process id of the new worker, which serves the socket; or minus an errno
    KILL + 8 bytes of pid      1 byte, when the worker and everything it started have ended

Whatever a worker starts ends with it (children.py), because every level ends what the level below has left:

    who has ended              who ends what is left
    a worker                   the fork server
    the fork server            the kernel ends the workers, the supervisor their children
    the supervisor             the fork server, which then ends itself
    the trainer                the supervisor, within PARENT_CHECK_S

All three ignore the signals with which SLURM asks all processes of a job to stop: the current step still needs them.
Imports no torch, unless the user's module does.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from oblr_megatron.processes.children import become_subreaper, end_children, has_ended
from oblr_megatron.runtime.processes import children_of, die_with
from oblr_megatron.runtime.stopping import SIGNALS
from oblr_megatron.user_functions import resolve

FORK, KILL, READY = b"F", b"K", b"R"
PID_BYTES = 8
MESSAGE_BYTES = 4000  # most of a traceback
PARENT_CHECK_S = 1.0
STDIN, STDOUT, STDERR = 0, 1, 2

Serve = Callable[[socket.socket], None]
"""Work of a forked process: it ends when this returns."""


def main(descriptor: int, parent: int, target: str, options: Mapping[str, Any], *, quiet: bool) -> None:
    """Call the target, report READY or a traceback, and serve until the parent ends.

    This process becomes the supervisor. It ends everything as soon as there is something to read on standard input.

    Args:
        descriptor: of this end of the socket pair.
        parent: process id of the trainer; everything ends within PARENT_CHECK_S after it.
        target: "package.module:function", called once with the options. It imports what workers need, and returns
            their work, a `Serve`.
        options: plain values.
        quiet: discard what workers print.
    """
    for number in SIGNALS:
        signal.signal(number, _ignore)
    become_subreaper()
    supervisor, server = os.getpid(), os.fork()
    if server:
        os.close(descriptor)
        _supervise(server, parent)
    become_subreaper()
    _discard(STDIN)
    os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=descriptor)
    try:
        serve: Serve = resolve(target)(**options)
    except BaseException:  # noqa: BLE001  importing user code may raise anything; the parent reports it
        control.sendall(traceback.format_exc().encode()[-MESSAGE_BYTES:])
        return
    if quiet:  # response texts may cause libraries to print
        _discard(STDOUT, STDERR)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until the process ends
    gc.freeze()  # keeps the memory of the imports shared between the workers
    control.sendall(READY)
    _serve(control, supervisor, serve)


def _supervise(server: int, parent: int) -> NoReturn:
    """Wait for the end of the fork server, of the trainer, or of the client; then end everything that is left."""
    _discard(STDOUT, STDERR)
    while os.getppid() == parent and not has_ended(server):
        if select.select([STDIN], [], [], PARENT_CHECK_S)[0]:
            break
    end_children()
    os._exit(0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Unlike SIG_IGN, a handler is not inherited by programs that a worker starts."""


def _serve(control: socket.socket, supervisor: int, serve: Serve) -> NoReturn:
    control.settimeout(PARENT_CHECK_S)
    helpers = set(children_of(os.getpid()))  # started by the import; they stay until the end
    workers: set[int] = set()
    while True:
        workers -= {pid for pid in workers if has_ended(pid)}
        end_children(workers | helpers)  # children that ended workers left behind
        message: bytes | None = None
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1 + PID_BYTES, 1)
        except TimeoutError:
            pass
        except OSError:
            break
        if message == b"" or os.getppid() != supervisor:
            break
        if message is None:
            continue
        if message[:1] == FORK:
            pid = _fork(control, descriptors[0], serve)
            workers |= {pid} if pid > 0 else set()
            control.sendall(pid.to_bytes(PID_BYTES, "little", signed=True))
        else:
            workers.discard(int.from_bytes(message[1:], "little"))
            end_children(workers | helpers)
            control.sendall(KILL)
    end_children()
    os._exit(0)


def _fork(control: socket.socket, descriptor: int, serve: Serve) -> int:
    """Process id of a new worker that serves the descriptor, or minus the errno of a fork that failed."""
    try:
        pid = os.fork()
    except OSError as error:  # no process or no memory is left; the client asks again
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        control.close()
        _work(descriptor, serve)
    os.close(descriptor)
    return pid


def _work(descriptor: int, serve: Serve) -> NoReturn:
    """In the forked child: die with the fork server, do the work."""
    try:
        die_with(os.getppid())
        os.setsid()  # a signal that the user's code sends to its group reaches no other worker
        become_subreaper()
        serve(socket.socket(fileno=descriptor))
    except BaseException:  # noqa: BLE001  nothing of the child may run in the code of its parent
        traceback.print_exc()
    finally:
        os._exit(0)


def _discard(*descriptors: int) -> None:
    """Connect standard streams to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
