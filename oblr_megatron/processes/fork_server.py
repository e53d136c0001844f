"""The fork server: a process that has done the workers' imports, so that forking a new worker takes milliseconds.

The supervisor, a child of the trainer process in its own session, forks it and waits. The fork server only forks and
kills on request:

    request                    answer
    FORK + a socket            8 bytes: process id of the new worker, which serves the socket
    KILL + 8 bytes of pid      1 byte, when the worker and everything it started have ended

Workers receive rows of strings as JSON and answer with a `Reply` (calls.py). Whatever a function starts ends with its
call (children.py), because every level ends what the level below has left:

    who has ended              who ends what is left
    a call, with an answer     the worker, before it answers
    a worker                   the fork server
    the fork server            the kernel ends the workers, the supervisor their children
    the supervisor             the fork server, which then ends itself
    the trainer                the supervisor, within PARENT_CHECK_S

All three ignore the signals with which SLURM asks all processes of a job to stop: the current step still needs them.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from oblr_megatron.processes.calls import Caller
from oblr_megatron.processes.children import become_subreaper, end_children, has_ended
from oblr_megatron.runtime.processes import children_of, die_with
from oblr_megatron.runtime.stopping import SIGNALS

MEMORY_BYTES = 2 * 2**30
"""Allocation limit of a worker, in addition to the memory of the imports."""
FORK, KILL = b"F", b"K"
PID_BYTES = 8
PARENT_CHECK_S = 1.0
STDIN, STDOUT, STDERR = 0, 1, 2


def main(
    descriptor: int,
    parent: int,
    target: str,
    prepare: str,
    *,
    deadline_s: float,
    imports: Sequence[str],
    returns_text: bool,
    tasks_per_worker: int,
) -> None:
    """Import the target, report "R" (ready) or "E" with a traceback, and serve until the parent ends.

    This process becomes the supervisor. It ends everything as soon as there is something to read on standard input.

    Args:
        descriptor: of this end of the socket pair.
        parent: process id of the trainer; everything ends within PARENT_CHECK_S after it.
        target, prepare, deadline_s, imports, returns_text, tasks_per_worker: as for `Pool`.
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
    control = socket.socket(fileno=descriptor)
    try:
        caller = Caller(resolve(target), deadline_s, returns_text=returns_text)
        for name in imports:
            resolve(name)
        if prepare:
            resolve(prepare)()
    except BaseException:  # noqa: BLE001 - importing user code may raise anything; the parent reports it
        control.sendall(b"E" + traceback.format_exc().encode()[-4000:])
        return
    _discard(STDOUT, STDERR)  # response texts may cause libraries to print
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    gc.freeze()  # keeps the memory of the imports shared between the workers
    control.sendall(b"R")
    _serve(control, supervisor, caller, tasks_per_worker)


def _supervise(server: int, parent: int) -> NoReturn:
    """Wait for the end of the fork server, of the trainer, or of the pool; then end everything that is left."""
    _discard(STDOUT, STDERR)
    while os.getppid() == parent and not has_ended(server):
        if select.select([STDIN], [], [], PARENT_CHECK_S)[0]:
            break
    end_children()
    os._exit(0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Unlike SIG_IGN, a handler is not inherited by programs that a reward function starts."""


def resolve(target: str) -> Any:
    """Import the object named "package.module:function" or "path/to/file.py:function".

    Raises:
        ImportError, AttributeError, OSError: it does not exist.
    """
    module, _, name = target.partition(":")
    found: Any = _from_file(Path(module).resolve()) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> ModuleType:
    """The module of a file, loaded once."""
    name = str(path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a name that ends with .py has a loader"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:  # half a module must not stay; the user's code may raise anything
            del sys.modules[name]
            raise
    return sys.modules[name]


def _serve(control: socket.socket, supervisor: int, caller: Caller, tasks: int) -> NoReturn:
    control.settimeout(PARENT_CHECK_S)
    helpers = set(children_of(os.getpid()))  # started by the import; they stay until the end
    workers: set[int] = set()
    while os.getppid() == supervisor:
        workers -= {pid for pid in workers if has_ended(pid)}
        end_children(workers | helpers)  # of workers that have ended
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
                _become_worker(control, descriptors[0], caller, tasks)
            os.close(descriptors[0])
            workers.add(pid)
            control.sendall(pid.to_bytes(PID_BYTES, "little"))
        else:
            workers.discard(int.from_bytes(message[1:], "little"))
            end_children(workers | helpers)
            control.sendall(b"K")
    end_children()
    os._exit(0)


def _become_worker(control: socket.socket, descriptor: int, caller: Caller, tasks: int) -> NoReturn:
    """In the forked child: die with the fork server, serve the socket."""
    try:
        die_with(os.getppid())
        become_subreaper()
        control.close()
        _limit_memory()
        _work(Connection(descriptor), caller, tasks)
    finally:
        os._exit(0)


def _work(end: Connection, caller: Caller, tasks: int) -> None:
    worker = os.getpid()
    for count in range(1, tasks + 1):
        try:
            rows = json.loads(end.recv_bytes())
        except EOFError:
            return
        reply = caller.answer(rows)
        if os.getpid() != worker:
            return  # a fork that the function forgot to end
        all_ended = end_children()
        reply.leaving |= count == tasks or not all_ended
        end.send_bytes(json.dumps(asdict(reply)).encode())
        if reply.leaving:
            return


def _limit_memory() -> None:
    """Limit the address space to its current size plus MEMORY_BYTES; disable core dumps."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _discard(*descriptors: int) -> None:
    """Connect standard streams to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
