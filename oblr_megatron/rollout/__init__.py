"""Sampling responses: engine processes of the run, API servers, or saved samples, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.engine.protocol import RolloutEngine
    from oblr_megatron.model.parallel import Parallel

Waiting = Callable[[str], AbstractContextManager[Any]]
"""Shows what a block waits for. Example: with waiting("starting 1 engine"): ..."""


def open_engines(
    config: Config, parallel: Parallel, waiting: Waiting = nullcontext, terminated: Callable[[], bool] = lambda: False
) -> RolloutEngine:
    """Saved samples (rollout.replay), API servers (rollout.servers), or engine processes of the run; collective.

    Each module is imported only if it is used: a replay loads no vllm. `terminated` says whether this rank is to end.

    Raises:
        UserError: the engines do not fit the ranks.
        RunError: on GPUs, an engine did not start.
    """
    if config.rollout.replay is not None:
        from oblr_megatron.rollout.replay import ReplayEngine

        return ReplayEngine(config, parallel)
    from oblr_megatron.rollout.placement import adapter_shape

    if config.rollout.servers:
        from oblr_megatron.rollout.servers import ServerEngines

        return ServerEngines(config, parallel, lora=adapter_shape(config), terminated=terminated)
    from oblr_megatron.rollout.colocated import ColocatedEngines

    return ColocatedEngines(config, parallel, waiting, lora=adapter_shape(config))
