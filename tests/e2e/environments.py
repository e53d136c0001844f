"""Environment functions of the tests; a prompt's `answer` chooses the behaviour."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

from oblr_megatron.environments import Episode, EpisodeEngine, LimitError, Prompt

OBSERVED = (5, 6, 7)  # tokens that the environment writes after each turn
TURNS = 3
NAP_S = 1.6
WORK_S = 0.3


async def turns(engine: EpisodeEngine, prompt: Prompt, seed: int) -> object:
    """Three short turns with observations; the reward is the mean of the policy's tokens. Misbehaves if asked to."""
    if prompt.answer == "calls":
        turn = await engine.generate(prompt.token_ids, max_tokens=6)
        return turn.ids, [True] * len(turn.ids), list(turn.logprobs), float(await engine.call("naps", {}))
    if prompt.answer == "works":
        time.sleep(WORK_S)
    if prompt.answer in BAD:
        return await BAD[prompt.answer](engine, prompt)
    episode = Episode(prompt.token_ids)
    for number in range(TURNS):
        if number:
            episode.saw(OBSERVED)
        await asyncio.sleep(0.001 * (seed % 5))  # episodes get out of step
        turn = await engine.generate(episode.ids, max_tokens=6)
        episode.wrote(turn)
    episode.reward = sum(turn.ids) / max(1, len(turn.ids))
    return episode


def naps() -> float:
    """Take a nap."""
    time.sleep(NAP_S)
    return NAP_S


async def _raises(engine: EpisodeEngine, prompt: Prompt) -> object:
    await engine.generate(prompt.token_ids, max_tokens=2)
    raise ValueError("the environment is out of order")


async def _sleeps(engine: EpisodeEngine, prompt: Prompt) -> object:
    await engine.generate(prompt.token_ids, max_tokens=2)
    await asyncio.sleep(3600)
    return None


async def _blocks(engine: EpisodeEngine, prompt: Prompt) -> object:
    await engine.generate(prompt.token_ids, max_tokens=2)
    time.sleep(3600)
    return None


async def _dies(engine: EpisodeEngine, prompt: Prompt) -> object:
    await engine.generate(prompt.token_ids, max_tokens=2)
    os._exit(3)


async def _orphans(engine: EpisodeEngine, prompt: Prompt) -> object:
    """Kills the process that forks, and with it, by the kernel, its own."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
    return None


async def _stubborn(engine: EpisodeEngine, prompt: Prompt) -> object:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


async def _leaves(engine: EpisodeEngine, prompt: Prompt) -> object:
    raise SystemExit(1)


async def _forged(engine: EpisodeEngine, prompt: Prompt) -> object:
    """Tokens that were tokenised again: they are not those that the engine drew."""
    turn = await engine.generate(prompt.token_ids, max_tokens=4)
    other = [2 + (token + 1) % 30 for token in turn.ids]
    return other, [True] * len(other), list(turn.logprobs)


async def _lengths(engine: EpisodeEngine, prompt: Prompt) -> object:
    turn = await engine.generate(prompt.token_ids, max_tokens=4)
    return list(turn.ids), [True], list(turn.logprobs)


async def _nan(engine: EpisodeEngine, prompt: Prompt) -> object:
    turn = await engine.generate(prompt.token_ids, max_tokens=4)
    return list(turn.ids), [True] * len(turn.ids), list(turn.logprobs), math.nan


async def _outside(engine: EpisodeEngine, prompt: Prompt) -> object:
    return [10**6], [False], [0.0]


async def _long(engine: EpisodeEngine, prompt: Prompt) -> object:
    return [3] * 10_000, [False] * 10_000, [0.0] * 10_000


async def _nothing(engine: EpisodeEngine, prompt: Prompt) -> object:
    return None


async def _runaway(engine: EpisodeEngine, prompt: Prompt) -> object:
    """Goes on until a limit ends it; lets the error pass."""
    episode = Episode(prompt.token_ids)
    while True:
        episode.wrote(await engine.generate(episode.ids, max_tokens=2))
        episode.saw(OBSERVED[:1])


async def _catches(engine: EpisodeEngine, prompt: Prompt) -> object:
    """The same, but gives a reward at the end."""
    episode = Episode(prompt.token_ids)
    try:
        while True:
            episode.wrote(await engine.generate(episode.ids, max_tokens=2))
    except LimitError:
        episode.reward = 0.5
        return episode


BAD = {
    function.__name__[1:]: function
    for function in (
        *(_raises, _sleeps, _blocks, _dies, _stubborn, _leaves, _forged, _lengths, _nan, _outside, _long, _nothing),
        *(_runaway, _catches, _orphans),
    )
}
LATE = ("sleeps", "blocks", "stubborn")
DRAWN = ("raises", "sleeps", "forged", "lengths", "nan")  # they fail after a turn; of a killed process nothing is left


async def second_thoughts(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
    """For the sums of examples/tiny_cpu: two answers with "=" between them; the reward is the share of right digits.

    Some prompts raise, hang or block; those that cost seconds are not among the first rows, which evaluations use.
    """
    if prompt.row % 9 == 0:
        raise ValueError("out of order")
    if prompt.row % 31 == 20:
        await asyncio.sleep(3600)
    if prompt.row % 31 == 21:
        time.sleep(3600)
    episode = Episode(prompt.token_ids)
    episode.wrote(await engine.generate(episode.ids, max_tokens=4))
    episode.saw(engine.encode("="))
    episode.wrote(await engine.generate(episode.ids, max_tokens=4))
    pairs = zip(episode.text, prompt.answer, strict=False)
    episode.reward = sum(own == gold for own, gold in pairs) / max(len(episode.text), len(prompt.answer))
    return episode
