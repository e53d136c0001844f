"""One episode in the loop of the environment process, over its socket: what the parent hears of it.

Not covered: the process itself (test_launcher.py), engines (tests/e2e/test_environments.py).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

from oblr_megatron.config.rollout import EnvironmentConfig
from oblr_megatron.engine.channel import Channel
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import Episode, EpisodeEngine
from oblr_megatron.environments.messages import Begin, Ended, Setup
from oblr_megatron.environments.process import Episodes
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.environments.watch import Watch
from oblr_megatron.types import Prompt
from tests.tiny import VOCAB, make_tokenizer

Function = Callable[[EpisodeEngine, Prompt, int], Awaitable[Episode]]
PROMPT = Prompt(row=0, id="p", text="", token_ids=(5, 9), answer="", source="")
TEMPLATE = "{% for one in messages %}{{ one.content }} {% endfor %}{% if mood is defined %}{{ mood }}{% endif %}"


def outcome(function: Function, *, max_tokens: int = 10) -> Ended:
    """Run one episode of the function."""
    ours, theirs = socket.socketpair()
    tokenizer, watch = make_tokenizer(), Watch()
    tokenizer.chat_template = TEMPLATE
    setup = Setup(EnvironmentConfig(function="here:function"), "model", VOCAB, (), {"mood": "t3"})
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
