"""A run looked at as a whole: checked, its models built, its memory counted.

found = examine(config, world_size=1024, per_node=8, device=Device(on_gpu=True, num_bytes=80 * 10**9, ...))
found.models.total, found.peak
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oblr_megatron.dryrun.checking import check_run, model_of
from oblr_megatron.dryrun.device_memory import Device, RankMemory, rank_memory
from oblr_megatron.dryrun.models import Models, build_models
from oblr_megatron.memory.pass_plan import Layout, idle_replicas
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.observe.performance.flops import total_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oblr_megatron.config import Config


@dataclass(frozen=True, slots=True)
class Found:
    """What a dry run knows. Example: Found(Config(...), "models/Q: whole", None, Models(...), (RankMemory(...),))"""

    config: Config  # with the norms' mode decided
    model: str  # which configuration it was, in a line
    idle: str | None  # a line, where replicas wait for one another
    models: Models
    memory: tuple[RankMemory, ...]  # of a rank of each pipeline stage

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(one.peak for one in self.memory)


def examine(config: Config, world_size: int, per_node: int, device: Device) -> Found:
    """Check a run, build the model of every position, count the memory of every rank.

    Args:
        config: the run.
        world_size: ranks of all nodes.
        per_node: ranks of one.
        device: what each runs on.

    Raises:
        UserError: the first thing found wrong. Whether it fits is for `checking.check_fits`.
    """
    hf_config, line = model_of(config.model.path)
    decided = check_run(hf_config, config, world_size, per_node, device)
    memory = tuple(rank_memory(hf_config, decided, world_size, device))
    models = build_models(hf_config, decided, world_size)
    _check_counts(hf_config, decided, models)
    idle = idle_replicas(decided, Layout.of(hf_config, decided, world_size))
    return Found(decided, line, idle, models, memory)


def _check_counts(hf_config: Mapping[str, Any], config: Config, models: Models) -> None:
    """The models that were built are those whose memory is counted, and together the model."""
    expected = total_parameters(hf_config)
    assert models.total == expected, f"{models.total} parameters in the ranks' models, {expected} in the model"
    for held in models.holdings:
        sizes = RankSizes.of(hf_config, config, held.position.pp)
        counted = (sizes.dense_parameters, sizes.expert_parameters)
        built = (held.dense, held.experts)
        assert built == counted, f"rank {held.ranks[0]} holds {built} parameters, and {counted} are counted"
