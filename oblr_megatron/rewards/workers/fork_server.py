"""The process that forks the judging workers: it has imported what they need, so that a new one is there at once.

It runs as a child of the process that judges, in a session of its own, and does nothing but fork and kill on request:

    request                    answer
    FORK + a socket            8 bytes: the new worker's process id; the worker serves the socket
    KILL + 8 bytes of pid      1 byte, when the worker is gone or at least beyond doing anything

The signals that ask a run to save and stop, which SLURM sends to every process of a job, do nothing to these: the step
in progress still needs them.

Workers receive rows of strings as JSON and answer with a `Reply` (calls.py). They die with the nursery (the kernel
sees to it), and the nursery ends when its parent closes the socket or dies, however it dies.
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
    """Import the target, say so, and serve until the parent is gone.

    Args:
        descriptor: this end of the socket pair.
        parent: process id to outlive by no more than PARENT_CHECK_S.
        target: "package.module:function" that judges.
        prepare: the same for a function called once before any worker is forked; "" for none.
        deadline_s: of what the target returns to be awaited.
        memory_bytes: what a worker may allocate beyond what it starts with.
        tasks_per_worker: a worker is replaced after so many requests.
    """
    for number in SIGNALS:
        signal.signal(number, _take_no_notice)
    control = socket.socket(fileno=descriptor)
    try:
        function = resolve(target)
        if prepare:
            resolve(prepare)()
    except BaseException:  # noqa: BLE001 - whatever the import raised is the parent's to report
        control.sendall(b"E" + traceback.format_exc().encode()[-4000:])
        return
    _silence()
    gc.freeze()  # what is imported stays shared between the workers
    control.sendall(b"R")
    _serve(control, parent, lambda end: _work(end, Caller(function, deadline_s), memory_bytes, tasks_per_worker))


def _take_no_notice(number: int, frame: FrameType | None) -> None:
    """A handler, since programs that a reward function starts would inherit SIG_IGN, and not end when asked to."""


def resolve(target: str) -> Any:
    """The object that "package.module:function" names.

    Raises:
        ImportError, AttributeError: there is none.
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
    """End a worker; a process that is not a living child of ours is left alone."""
    if pid in children:
        os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            children.discard(pid)


def _become_worker(control: socket.socket, descriptor: int, work: Callable[[Connection], None]) -> None:
    """In the forked child: die with the nursery, serve the socket, never return."""
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
        reply["leaving"] |= count == tasks
        end.send_bytes(json.dumps(reply).encode())
        if reply["leaving"]:
            return


def _limit_memory(extra: int) -> None:
    """Bound the address space, counted from what the imports already take."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _silence() -> None:
    """Whatever a judged text makes a library print goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process's life
