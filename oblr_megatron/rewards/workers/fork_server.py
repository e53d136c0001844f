"""The fork server: a process that has done the workers' imports, so that forking a new worker takes milliseconds.

It is a child of the trainer process, in its own session. It only forks and kills on request:

    request                    answer
    FORK + a socket            8 bytes: process id of the new worker, which serves the socket
    KILL + 8 bytes of pid      1 byte, after SIGKILL was sent

Workers receive rows of strings as JSON and answer with a `Reply` (calls.py). The kernel kills them when the fork server
dies. The fork server ends when its parent closes the socket or dies in any way. Both ignore the signals with which
SLURM asks all processes of a job to stop, because the current step still needs them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from oblr_megatron.rewards.workers.calls import Caller
from oblr_megatron.runtime.stopping import SIGNALS, die_with

FORK, KILL = b"F", b"K"
PID_BYTES = 8
PARENT_CHECK_S = 1.0


def main(
    descriptor: int,
    parent: int,
    target: str,
    prepare: str,
    *,
    deadline_s: float,
    memory_bytes: int,
    tasks_per_worker: int,
) -> None:
    """Import the target, report "R" (ready) or "E" with a traceback, and serve until the parent ends.

    Args:
        descriptor: of this end of the socket pair.
        parent: process id; the fork server exits within PARENT_CHECK_S after it.
        target: "package.module:function", the reward function.
        prepare: "package.module:function", called once before the first fork; "" for none.
        deadline_s: for awaited calls.
        memory_bytes: a worker's allocation limit, in addition to the memory of the imports.
        tasks_per_worker: a worker is replaced after this many requests.
    """
    for number in SIGNALS:
        signal.signal(number, _ignore)
    control = socket.socket(fileno=descriptor)
    try:
        function = resolve(target)
        if prepare:
            resolve(prepare)()
    except BaseException:  # noqa: BLE001 - importing user code may raise anything; the parent reports it
        control.sendall(b"E" + traceback.format_exc().encode()[-4000:])
        return
    _silence()
    gc.freeze()  # keeps the memory of the imports shared between the workers
    control.sendall(b"R")
    _serve(control, parent, lambda end: _work(end, Caller(function, deadline_s), memory_bytes, tasks_per_worker))


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Unlike SIG_IGN, a handler is not inherited by programs that a reward function starts."""


def resolve(target: str) -> Any:
    """Import the object named "package.module:function".

    Raises:
        ImportError, AttributeError: it does not exist.
    """
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _serve(control: socket.socket, parent: int, work: Callable[[Connection], None]) -> None:
    control.settimeout(PARENT_CHECK_S)
    children: set[int] = set()
    while os.getppid() == parent:
        _reap(children)
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1 + PID_BYTES, 1)
        except TimeoutError:
            continue
        except OSError:
            break
        if not message:
            break
        if message[:1] == FORK:
            pid = os.fork()
            if pid == 0:
                _become_worker(control, descriptors[0], work)
            os.close(descriptors[0])
            children.add(pid)
            control.sendall(pid.to_bytes(PID_BYTES, "little"))
        else:
            _kill(int.from_bytes(message[1:], "little"), children)
            control.sendall(b"K")
    os._exit(0)


def _kill(pid: int, children: set[int]) -> None:
    """Kill a worker; other process ids are ignored."""
    if pid in children:
        os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            children.discard(pid)


def _become_worker(control: socket.socket, descriptor: int, work: Callable[[Connection], None]) -> None:
    """In the forked child: die with the fork server, serve the socket, never return."""
    try:
        die_with(os.getppid())
        control.close()
        work(Connection(descriptor))
    finally:
        os._exit(0)


def _work(end: Connection, caller: Caller, memory_bytes: int, tasks: int) -> None:
    _limit_memory(memory_bytes)
    for count in range(1, tasks + 1):
        try:
            rows = json.loads(end.recv_bytes())
        except EOFError:
            return
        reply = caller.answer(rows)
        reply.leaving |= count == tasks
        end.send_bytes(json.dumps(asdict(reply)).encode())
        if reply.leaving:
            return


def _limit_memory(extra: int) -> None:
    """Limit the address space to its current size plus `extra` bytes; disable core dumps."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _silence() -> None:
    """Discard all output: response texts may cause libraries to print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
