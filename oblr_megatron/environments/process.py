"""The environment process: a worker of the fork server that plays many episodes in one event loop.

So the function can block neither the engine nor the training rank, and a process that was killed is replaced at once.
host.py starts it and answers its calls. Imports no torch, unless the function does.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from oblr_megatron.config.rollout import EnvironmentConfig
from oblr_megatron.engine.channel import Channel, PeerGone
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import EpisodeEngine, LimitError, cut, ended
from oblr_megatron.environments.messages import Answer, Begin, Cancel, Ended, SampleCall, ToolWait
from oblr_megatron.environments.registry import function_of
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.processes.fork_server import Serve
from oblr_megatron.processes.watch import JOB, Watch, watch_tasks
from oblr_megatron.user_functions import resolve

if TYPE_CHECKING:
    from oblr_megatron.config import Config

MAX_ERROR = 4000  # characters of a traceback


@dataclass(frozen=True, slots=True)
class Setup:
    """The part of an episode's arguments that all episodes of a run share."""

    config: EnvironmentConfig
    function: Callable[..., Any]
    tokenizer: Any
    vocab_size: int
    template_options: Mapping[str, Any]  # data.chat_template_options


def options_of(config: Config) -> dict[str, Any]:
    """The options of `plays`, but for the watch.

    They name the tokenizer's class: `AutoTokenizer` finds it, but imports torch, which a rank has already.
    """
    from transformers import AutoTokenizer

    model = str(config.model.path.absolute())
    tokenizer = type(AutoTokenizer.from_pretrained(model, trust_remote_code=False))
    shapes = json.loads((config.model.path / "config.json").read_text(encoding="utf-8"))
    return {
        "environment": config.rollout.environment.model_dump(mode="json"),
        "tokenizer": f"{tokenizer.__module__}:{tokenizer.__qualname__}",
        "model": model,
        "vocab_size": int(shapes["vocab_size"]),
        "template_options": dict(config.data.chat_template_options),
    }


def plays(
    environment: Mapping[str, Any],
    tokenizer: str,
    model: str,
    vocab_size: int,
    template_options: Mapping[str, Any],
    watch: int,
) -> Serve:
    """The work of an environment process; called in the fork server, where it imports the function.

    Args:
        environment: the section rollout.environment.
        tokenizer: "package.module:class" of the tokenizer in `model`.
        model: directory.
        vocab_size: of the model.
        template_options: data.chat_template_options.
        watch: descriptor of the `Watch`.
    """
    os.set_inheritable(watch, False)
    config = EnvironmentConfig.model_validate(environment)
    own = resolve(tokenizer).from_pretrained(model)
    setup = Setup(config, function_of(config.function), own, vocab_size, template_options)
    return lambda end: _serve(end, setup, Watch(watch))


def _serve(end: socket.socket, setup: Setup, watch: Watch) -> None:
    config = setup.config
    toolbox = Toolbox(config.tools, num_workers=config.tool_workers, deadline_s=config.tool_timeout_s)
    with suppress(PeerGone):
        asyncio.run(Episodes(Channel(end), setup, toolbox, watch).run())
    toolbox.close()


@dataclass(slots=True)
class Episodes:
    """The running episodes of this process."""

    channel: Channel
    setup: Setup
    toolbox: Toolbox
    watch: Watch
    waiting: dict[tuple[int, int], asyncio.Future[Turn]] = field(default_factory=dict)  # by episode and call
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by episode
    tasks: dict[int, set[asyncio.Task[Any]]] = field(default_factory=dict)  # all that each episode has started
    late: set[int] = field(default_factory=set)  # episodes

    async def run(self) -> None:
        """Handle messages until the parent ends."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        watch_tasks(loop, self.watch, self.tasks)

        def read() -> None:
            with suppress(PeerGone, RuntimeError):  # the loop may have ended
                while True:
                    loop.call_soon_threadsafe(self._handle, self.channel.receive())
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="messages", daemon=True).start()
        await over.wait()

    def _handle(self, messages: list[Begin | Answer | Cancel]) -> None:
        loop = asyncio.get_running_loop()
        for message in messages:
            if isinstance(message, Answer):
                future = self.waiting.pop((message.number, message.call), None)
                if future is not None and not future.done():
                    future.set_result(message.turn)
            elif isinstance(message, Begin):
                JOB.set(message.number)  # in this callback's context alone; the task copies it
                self.running[message.number] = loop.create_task(self._episode(message))
            elif (task := self.running.get(message.number)) is not None:
                self.late.add(message.number)
                loop.call_soon(task.cancel)  # after its first step: a task without one would send no result

    async def _episode(self, begin: Begin) -> None:
        async def ask(call: SampleCall) -> Turn:
            future = self.waiting[begin.number, call.call] = asyncio.get_running_loop().create_future()
            try:
                self.channel.send(call)
                return await future
            finally:
                self.waiting.pop((begin.number, call.call), None)

        async def call_tool(tool: str, arguments: Mapping[str, Any]) -> str:
            """The episode's clock stands still until a worker begins with the call."""
            loop, waits = asyncio.get_running_loop(), True

            def begun() -> None:
                nonlocal waits
                if waits:
                    waits = False
                    self.channel.send(ToolWait(begin.number, -1))

            self.channel.send(ToolWait(begin.number, 1))
            try:
                return await self.toolbox.call(tool, arguments, lambda: loop.call_soon_threadsafe(begun))
            finally:
                begun()

        setup = self.setup
        limits = setup.vocab_size, setup.config.max_turns
        engine = EpisodeEngine(begin, setup.tokenizer, *limits, ask, call_tool, setup.template_options)
        self.channel.send(await self._outcome(engine))
        self.late.discard(begin.number)
        for task in self.tasks.pop(begin.number, set()) - {self.running.pop(begin.number)}:
            task.cancel()  # that the function left behind

    async def _outcome(self, engine: EpisodeEngine) -> Ended:
        """Run the function; its result, or why there is none."""
        number = engine.begin.number
        try:
            return ended(engine, await self.setup.function(engine, engine.begin.prompt, engine.begin.seed))
        except LimitError:
            return cut(engine)
        except BaseException as error:  # noqa: BLE001  a user's function may raise anything, SystemExit included
            if isinstance(error, BaseExceptionGroup) and error.split(LimitError)[1] is None:
                return cut(engine)  # several turns at once, in an asyncio.TaskGroup
            # Its tokens stay, with the reward 0. An empty response would have no gradient: failing would then be worth
            # the baseline, more than a wrong answer.
            drawn = replace(cut(engine), text="", reward=None)
            if number in self.late:
                limit = self.setup.config.deadline_s
                return replace(drawn, finish_reason="late", error=f"the episode took longer than {limit:g} seconds")
            text = "".join(traceback.format_exception(error))[-MAX_ERROR:]
            return replace(drawn, finish_reason="failed", error=text)
