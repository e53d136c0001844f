"""Environments: episodes of several turns, with tools. Imports no torch.

    from oblr_megatron.environments import Episode, EpisodeEngine, Prompt

    async def environment(engine: EpisodeEngine, prompt: Prompt, seed: int) -> Episode:
        episode = Episode(prompt.token_ids)
        turn = await engine.generate(episode.ids)
        episode.wrote(turn)
        episode.saw(engine.encode("\\nIs that right?"))
        episode.wrote(await engine.generate(episode.ids))
        episode.reward = float("yes" in episode.text)
        return episode

`rollout.environment` names such a function (docs/environments.md).
"""

from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import Episode, EpisodeEngine, LimitError
from oblr_megatron.types import Prompt

__all__ = ["Episode", "EpisodeEngine", "LimitError", "Prompt", "Turn"]
