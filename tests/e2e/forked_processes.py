"""Fork engines, servers and commands from a process that has imported torch and vLLM: 2 to 12 CPU seconds saved each.

    fork_keeper()           # in a rank before its first thread: from here on `VllmEngine` forks its process
    make_keeper()           # in pytest, which has threads and no vLLM: the fork server forks the keeper
    popen([sys.executable, "-m", MODULE, ...], ...)     # of a command

    the caller, a rank or pytest     becomes the parent, as ever: it waits for the process, which ends with it
        the keeper                   has no threads and has imported what an engine imports
            a short-lived process    ends at once, so that the kernel gives its child, the new process, to the caller

The new process has the environment, descriptors, session, processor cores and command line that `Popen` would give it.
A command has a keeper of its own, which forks the ranks and engines that it starts. A server, a launcher with its
ranks, and `train` on saved samples are also started as a user starts them. For a run's engines, nightly tests do so.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from multiprocessing import process as current
from multiprocessing import resource_tracker, util
from typing import Any, NoReturn

from setproctitle import setproctitle

from oblr_megatron import api
from oblr_megatron.engine import handle
from tests.distributed.launch import PRELOAD

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SPAWNED = "--multiprocessing-fork"  # in the command of a process that multiprocessing spawns
FREE = 500  # the first of the descriptors that nothing uses
_libc = ctypes.CDLL(None, use_errno=True)
_launching = threading.Lock()


@dataclass(frozen=True)
class Request:
    """`descriptors` are the numbers that the received descriptors will have."""

    parent: int
    command: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int]
    directory: str
    cores: set[int]
    session: bool = True  # a new one


def fork_keeper() -> None:
    """Fork a keeper from this process, which has no threads and has imported vLLM."""
    keeper = _fork_keeper()
    _use(lambda: keeper)


def _fork_keeper() -> socket.socket:
    own, other = socket.socketpair()
    if os.fork() == 0:
        own.close()
        _keep(other)
    other.close()
    return own


def make_keeper() -> None:
    """Let the fork server make a keeper for this process when it is first needed."""

    @cache
    def keeper() -> socket.socket:
        own, other = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        context.Process(target=_keep, args=(other,), daemon=True).start()
        other.close()
        return own

    _use(keeper)


class Forked(subprocess.Popen[Any]):
    """`Popen` of a command of this interpreter that a keeper starts; its standard input is empty."""

    keeper: Callable[[], socket.socket] | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        """Called by `Popen`, once it has opened its pipes."""
        names = [*signature(subprocess.Popen._execute_child).parameters][2:]  # type: ignore[attr-defined]
        given = dict(zip(names, others, strict=True))
        outputs = [
            given[name] if given[name] != -1 else inherited for name, inherited in (("c2pwrite", 1), ("errwrite", 2))
        ]
        kept = (1, 2, *given["pass_fds"])
        directory, environment = given["cwd"] or os.getcwd(), {**(given["env"] or os.environ)}
        cores, session = os.sched_getaffinity(0), given["start_new_session"]
        request = Request(os.getpid(), [*args], environment, kept, str(directory), cores, session)
        assert self.keeper is not None
        self.pid = _launch(self.keeper(), request, [*outputs, *given["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names if name.startswith(("p2c", "c2p", "err"))))  # type: ignore[attr-defined]


def popen(args: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Like `Popen`, which it is without a keeper and for another program.

    The number of threads is read at an import, so other numbers than 1 need a new interpreter.
    """
    one_thread = (os.environ if env is None else env).get("OMP_NUM_THREADS") == "1"
    forks = Forked.keeper and one_thread and args[0] == sys.executable
    return (Forked if forks else subprocess.Popen)(args, env=env, **options)


def _use(keeper: Callable[[], socket.socket]) -> None:
    """Start engines and the commands of the Python API by this keeper."""
    Forked.keeper = staticmethod(keeper)
    handle.Popen = api.Popen = popen  # type: ignore[assignment, misc]


def _use_to_spawn(keeper: socket.socket) -> None:
    """Let multiprocessing start the processes of its "spawn" method by this keeper."""
    plain = util.spawnv_passfds

    def start(path: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
        if SPAWNED not in command:  # the resource tracker
            return plain(path, command, descriptors)
        kept, words = (1, 2, *descriptors), [os.fsdecode(word) for word in command]
        request = Request(os.getpid(), words, {**os.environ}, kept, os.getcwd(), os.sched_getaffinity(0), False)
        return _launch(keeper, request, kept)

    util.spawnv_passfds = start


def _launch(keeper: socket.socket, request: Request, sent: Sequence[int]) -> int:
    """The identifier of a new child of this process, which has the descriptors `sent`."""
    with _launching:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        socket.send_fds(keeper, [pickle.dumps(request)], [*sent])
        pid = int(keeper.recv(64))
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _keep(requests: socket.socket) -> None:
    """Serve requests until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 16)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _become(pickle.loads(message), descriptors, requests)
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: Request, received: Sequence[int], requests: socket.socket) -> None:
    """Be the process that `request` describes; never returns."""
    while os.getppid() != request.parent:  # `between` has not ended
        time.sleep(0.001)
    if request.session:
        os.setsid()
    requests.send(str(os.getpid()).encode())
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in received]
    os.closerange(3, FREE)
    for descriptor, number in zip(moved, request.descriptors, strict=True):
        os.dup2(descriptor, number)
    os.closerange(FREE, FREE + 2 * len(moved))
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), 0)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.sched_setaffinity(0, request.cores)
    os.chdir(request.directory)
    setproctitle(" ".join(request.command))  # in the memory of the old environment
    os.environ.clear()
    os.environ.update(request.environment)
    status = 1
    try:
        status = _run(request.command)
    except SystemExit as error:
        status = int(error.code or 0)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = -signal.SIGINT
    except BaseException:  # noqa: BLE001  what a new interpreter would print
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def _run(command: Sequence[str]) -> int:
    """`python [-u] [-P] -m MODULE ...`, `python -c CODE ...`, or what multiprocessing spawns, here."""
    from oblr_megatron.engine import worker

    kind, target, *arguments = _words(command)
    sys.argv = [target, *arguments]
    if "-P" not in command and "PYTHONSAFEPATH" not in os.environ:
        sys.path[:0] = [os.getcwd()]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # its pipe is closed here
    current._parent_process = None  # type: ignore[attr-defined]
    current.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    _read_variables()
    if SPAWNED in command:
        sys.argv = ["-c", SPAWNED]
        exec(command[command.index("-c") + 1], {"__name__": "__main__"})
        return 0
    if target == worker.__name__:
        return worker.main(arguments)
    _fork_further()
    if kind == "-c":
        sys.argv[0] = kind
        exec(target, {"__name__": "__main__"})
    else:
        sys.modules.pop(target, None)
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    return 0


def _words(command: Sequence[str]) -> Sequence[str]:
    """A command of Python without its name and its flags."""
    first = next(place for place, word in enumerate(command) if word in ("-m", "-c"))
    return command[first:]


def _fork_further() -> None:
    """Let this process fork what it starts, too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    keeper = _fork_keeper()
    _use(lambda: keeper)
    _use_to_spawn(keeper)
    subprocess_handler.Popen = popen
    os.execve = _go_on  # type: ignore[assignment]
    os.execv = lambda path, words: _go_on(path, words, {**os.environ})  # type: ignore[assignment, return-value]


def _read_variables() -> None:
    """Read what torch has read from the environment when it was imported."""
    import torch._dynamo

    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _go_on(_: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """`serve` and `train` replace their process by `python -m ...`; here that module runs in the same process."""
    os.environ.clear()
    os.environ.update(environment)
    _read_variables()
    _, module, *arguments = _words(command)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)
