"""One episode in the loop of the environment process, over its socket: what the parent hears of it.

Not covered: engines (tests/e2e/test_environments.py), fork servers that die (tests/unit/processes/test_client.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest

from oblr_megatron.config.rollout import EnvironmentConfig
from oblr_megatron.engine.channel import Channel
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import Episode, EpisodeEngine
from oblr_megatron.environments.messages import Begin, Cancel, Ended
from oblr_megatron.environments.process import Episodes, Setup
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.processes.watch import Watch
from oblr_megatron.types import Prompt
from tests.tiny import VOCAB, make_tokenizer

Function = Callable[[EpisodeEngine, Prompt, int], Awaitable[Episode]]
PROMPT = Prompt(row=0, id="p", text="", token_ids=(5, 9), answer="", source="")
TEMPLATE = "{% for one in messages %}{{ one.content }} {% endfor %}{% if mood is defined %}{{ mood }}{% endif %}"
HALF = json.loads(r'"t7 \ud83d"')


def outcome(function: Function, *, max_tokens: int = 10, cancelled: bool = False) -> Ended:
    """Run one episode of the function; `cancelled` before it can begin."""
    ours, theirs = socket.socketpair()
    tokenizer, watch = make_tokenizer(), Watch()
    tokenizer.chat_template = TEMPLATE
    setup = Setup(EnvironmentConfig(function="here:function"), function, tokenizer, VOCAB, {"mood": "t3"})
    toolbox = Toolbox([], num_workers=1, deadline_s=1.0)
    episodes = Episodes(Channel(theirs), setup, toolbox, watch)
    thread = threading.Thread(target=lambda: asyncio.run(episodes.run()))
    thread.start()
    with ours, theirs:
        parent = Channel(ours)
        begin = Begin(number=4, prompt=PROMPT, seed=1, max_tokens=max_tokens)
        parent.send([begin, Cancel(4)] if cancelled else [begin])
        try:
            while not isinstance(ended := parent.receive(), Ended):
                continue  # a call for a response, which nobody answers
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()
    toolbox.close()
    watch.close()
    return ended


async def sees(engine: EpisodeEngine, text: str) -> Episode:
    episode = Episode(PROMPT.token_ids)
    episode.saw(engine.observation([{"role": "tool", "content": text}], after=Turn((8,), (0.0,), "t8", "length")))
    return episode


def test_observations_are_rendered_with_the_options_of_the_prompt() -> None:
    ended = outcome(lambda engine, prompt, seed: sees(engine, "t7"))
    assert (ended.error, ended.ids) == ("", (7, 3))


def test_a_task_that_outlives_its_episode_ends_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """It waits for a response when the function returns, and is cancelled then."""
    left: list[asyncio.Task[Turn]] = []

    async def leaves_a_task(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
        left.append(asyncio.create_task(engine.generate(prompt.token_ids)))
        await asyncio.sleep(0)
        return await sees(engine, "t7")

    assert outcome(leaves_a_task).error == "" and left[0].cancelled() and caplog.text == ""


@pytest.mark.parametrize("waits", [False, True])
def test_an_episode_is_late_when_it_is_cancelled(waits: bool) -> None:
    async def long(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
        if waits:
            await engine.generate(prompt.token_ids)
        await asyncio.sleep(3600)
        raise AssertionError("it is cancelled")

    ended = outcome(long, cancelled=True)
    assert (ended.finish_reason, ended.ids) == ("late", ()) and "longer than 60 seconds" in ended.error


def test_an_episode_may_end_itself_when_it_is_cancelled() -> None:
    async def hurries(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return await sees(engine, "t7")
        raise AssertionError("it is cancelled")

    assert outcome(hurries, cancelled=True).finish_reason == "stop"


def test_an_observation_may_hold_half_of_a_surrogate_pair() -> None:
    ended = outcome(lambda engine, prompt, seed: sees(engine, HALF))
    assert (ended.error, ended.ids[0], ended.ids[-1]) == ("", 7, 3)


@pytest.mark.parametrize(("other", "reason"), [(None, "length"), (LookupError("a fault"), "failed")])
def test_a_group_of_tasks_that_are_all_at_the_limit_is_cut(other: Exception | None, reason: str) -> None:
    async def asks_twice(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
        async def second() -> None:
            if other is not None:
                raise other
            await engine.generate(prompt.token_ids)

        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate(prompt.token_ids))
            group.create_task(second())
        raise AssertionError("both tasks raise")

    ended = outcome(asks_twice, max_tokens=0)
    assert ended.finish_reason == reason
    assert ("LookupError: a fault" in ended.error) is (other is not None)
