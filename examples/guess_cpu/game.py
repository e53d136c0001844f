"""A game of several turns as an environment: guess a number from 1 to 15; after each guess comes "higher" or "lower".

The reward is 1 if one of the first four guesses is right. Halving the range always reaches that.
"""

from __future__ import annotations

from oblr_megatron.environments import Episode, EpisodeEngine, Prompt

GUESSES = 4


async def play(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
    """One game; the row's answer is the number."""
    secret = int(prompt.answer)
    episode = Episode(prompt.token_ids)
    for number in range(GUESSES):
        turn = await engine.generate(episode.ids, max_tokens=1)
        episode.wrote(turn)
        guess = int(turn.text) if turn.text.isdecimal() else 0
        if guess == secret:
            break
        if number < GUESSES - 1:
            episode.saw(engine.encode("higher" if guess < secret else "lower"))
    episode.reward = float(guess == secret)
    return episode
