"""The environment process: `python -m oblr_megatron.environments.process SOCKET_FD WATCH_FD PARENT_PID`.

It imports the user's function once, then forks a process that runs it for many episodes in one event loop. So the
function can block neither the engine nor the training rank, and a process that was killed is replaced at once. host.py
starts it and answers its wishes; both processes end with the trainer. Imports no torch, unless the function does.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from oblr_megatron.engine.channel import Channel, PeerGone
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import EpisodeEngine, LimitError, cut, ended
from oblr_megatron.environments.messages import READY, Answer, Begin, Ended, Setup, Wish
from oblr_megatron.environments.registry import function_of
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.environments.watch import EPISODE, Watch, watch_tasks
from oblr_megatron.runtime.processes import die_with
from oblr_megatron.runtime.stopping import SIGNALS

MAX_ERROR = 4000  # characters of a traceback
PID_BYTES = 8
"""Size of the answer to a fork: the new process's id, or minus the errno of a fork that failed."""


class Clock:
    """The time that an episode may still take; it stands still while the episode waits for the engine."""

    def __init__(self, seconds: float) -> None:
        """Start it, inside of the episode's task."""
        self.timeout = asyncio.timeout(seconds)
        self._left, self._waits = seconds, 0

    def stop(self) -> None:
        """The episode begins to wait for one more response."""
        if self._waits == 0 and (end := self.timeout.when()) is not None:
            self._left = end - asyncio.get_running_loop().time()
            self.timeout.reschedule(None)
        self._waits += 1

    def go_on(self) -> None:
        """A response has come."""
        self._waits -= 1
        if self._waits == 0 and not self.timeout.expired():
            with suppress(RuntimeError):  # the episode has ended, and left this task behind
                self.timeout.reschedule(asyncio.get_running_loop().time() + self._left)


@dataclass(slots=True)
class Episodes:
    """The running episodes of this process."""

    channel: Channel
    setup: Setup
    function: Callable[..., Any]
    tokenizer: Any
    toolbox: Toolbox
    watch: Watch
    waiting: dict[tuple[int, int], asyncio.Future[Turn]] = field(default_factory=dict)  # by episode and call
    tasks: dict[int, set[asyncio.Task[Any]]] = field(default_factory=dict)  # of each episode

    async def run(self) -> None:
        """Answer messages until the parent ends."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        watch_tasks(loop, self.watch, self.tasks)

        def read() -> None:
            with suppress(PeerGone, RuntimeError):  # the loop may have ended
                while True:
                    loop.call_soon_threadsafe(self._take, self.channel.receive())
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="messages", daemon=True).start()
        await over.wait()

    def _take(self, messages: list[Begin | Answer]) -> None:
        for message in messages:
            if isinstance(message, Answer):
                future = self.waiting.pop((message.number, message.call), None)
                if future is not None and not future.done():
                    future.set_result(message.turn)
            else:
                EPISODE.set(message.number)  # of this callback's context alone; the task copies it
                asyncio.get_running_loop().create_task(self._episode(message))

    async def _episode(self, begin: Begin) -> None:
        clock = Clock(self.setup.config.deadline_s)

        async def ask(wish: Wish) -> Turn:
            future = self.waiting[begin.number, wish.call] = asyncio.get_running_loop().create_future()
            clock.stop()
            try:
                self.channel.send(wish)
                return await future
            finally:
                self.waiting.pop((begin.number, wish.call), None)
                clock.go_on()

        setup, environment, call = self.setup, self.setup.config, self.toolbox.call
        limits = setup.vocab_size, environment.max_turns
        engine = EpisodeEngine(begin, self.tokenizer, *limits, ask, call, setup.template_options)
        self.channel.send(await self._outcome(engine, clock))
        for task in self.tasks.pop(begin.number, set()) - {asyncio.current_task()}:
            task.cancel()  # that the function left behind

    async def _outcome(self, engine: EpisodeEngine, clock: Clock) -> Ended:
        """Run the function; its result, or why there is none."""
        number = engine.begin.number
        try:
            async with clock.timeout:
                returned = await self.function(engine, engine.begin.prompt, engine.begin.seed)
            return ended(engine, returned)
        except LimitError:
            return cut(engine)
        except BaseException as error:  # noqa: BLE001  a user's function may raise anything, SystemExit included
            if isinstance(error, BaseExceptionGroup) and error.split(LimitError)[1] is None:
                return cut(engine)  # several turns at once, in an asyncio.TaskGroup
            if clock.timeout.expired():
                limit = self.setup.config.deadline_s
                return Ended(number, finish_reason="late", error=f"the episode took longer than {limit:g} seconds")
            text = "".join(traceback.format_exception(error))[-MAX_ERROR:]
            return Ended(number, finish_reason="failed", error=text)


def main(arguments: list[str]) -> int:
    """Import the function and the tokenizer, and fork a process for the episodes whenever the trainer asks for one."""
    fd, watch_fd, parent = map(int, arguments)
    die_with(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for inherited in (fd, watch_fd):
        os.set_inheritable(inherited, False)
    control = socket.socket(fileno=fd)
    channel = Channel(control)
    try:
        setup: Setup = channel.receive()
        sys.path[:] = setup.path
        function = function_of(setup.config.function)
        tokenizer = setup.tokenizer.from_pretrained(setup.model)
        gc.freeze()  # keeps the memory of the imports shared
        channel.send(READY)
    except PeerGone:
        return 0
    watch, children = Watch(watch_fd), set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            return 0
        try:
            pid = os.fork()
        except OSError as error:  # no process or no memory is left; the launcher asks again, or ends the run
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            control.close()
            _serve(setup, function, tokenizer, watch, descriptors[0])
        os.close(descriptors[0])
        if pid > 0:
            children.add(pid)
        control.sendall(pid.to_bytes(PID_BYTES, "little", signed=True))


def _serve(setup: Setup, function: Callable[..., Any], tokenizer: Any, watch: Watch, descriptor: int) -> NoReturn:
    """In the forked process: run episodes until the trainer ends."""
    try:
        die_with(os.getppid())
        os.setsid()  # one signal ends what the function starts, too
        environment, channel = setup.config, Channel(socket.socket(fileno=descriptor))
        toolbox = Toolbox(
            environment.tools, num_workers=environment.tool_workers, deadline_s=environment.tool_timeout_s
        )
        with suppress(PeerGone):
            asyncio.run(Episodes(channel, setup, function, tokenizer, toolbox, watch).run())
        toolbox.close()
    except BaseException:  # noqa: BLE001  nothing of the child may run in the code of its parent
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
