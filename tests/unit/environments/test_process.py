"""One episode in the loop of the environment process, over its socket: what the parent hears of it.

Not covered: the process itself (test_launcher.py), engines (tests/e2e/test_environments.py).
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
from oblr_megatron.environments.messages import Begin, Ended, Setup
from oblr_megatron.environments.process import Clock, Episodes
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.environments.watch import Watch
from oblr_megatron.types import Prompt
from tests.tiny import VOCAB, make_tokenizer

Function = Callable[[EpisodeEngine, Prompt, int], Awaitable[Episode]]
PROMPT = Prompt(row=0, id="p", text="", token_ids=(5, 9), answer="", source="")
TEMPLATE = "{% for one in messages %}{{ one.content }} {% endfor %}{% if mood is defined %}{{ mood }}{% endif %}"
HALF = json.loads(r'"t7 \ud83d"')


def outcome(function: Function, *, max_tokens: int = 10) -> Ended:
    """Run one episode of the function."""
    ours, theirs = socket.socketpair()
    tokenizer, watch = make_tokenizer(), Watch()
    tokenizer.chat_template = TEMPLATE
    setup = Setup(EnvironmentConfig(function="here:function"), type(tokenizer), "model", VOCAB, (), {"mood": "t3"})
    toolbox = Toolbox([], num_workers=1, deadline_s=1.0)
    episodes = Episodes(Channel(theirs), setup, function, tokenizer, toolbox, watch)
    thread = threading.Thread(target=lambda: asyncio.run(episodes.run()))
    thread.start()
    with ours, theirs:
        parent = Channel(ours)
        parent.send([Begin(number=4, prompt=PROMPT, seed=1, max_tokens=max_tokens)])
        try:
            ended: Ended = parent.receive()
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


def test_a_task_that_outlives_its_episode_ends_without_an_error() -> None:
    """It waits for a response when the function returns, and is cancelled then."""

    async def wait(clock: Clock) -> None:
        clock.stop()
        try:
            await asyncio.sleep(60)
        finally:
            clock.go_on()

    async def episode() -> None:
        clock = Clock(60.0)
        async with clock.timeout:
            task = asyncio.create_task(wait(clock))
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(episode())


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
