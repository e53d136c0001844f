"""A dry run: check the run, build its models, count its memory.

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
    """Result of a dry run.

    Example: Found(Config(...), {...}, 8, Device(...), "models/Q: complete", None, Models(...), (RankMemory(...),))
    """

    config: Config  # with its norm mode chosen
    hf_config: Mapping[str, Any]
    world_size: int
    device: Device  # of each rank
    model: str  # a line that names the source of the model's configuration
    idle: str | None  # a warning if replicas wait for one another
    models: Models
    memory: tuple[RankMemory, ...]  # one rank of each pipeline stage

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(one.peak for one in self.memory)


def examine(config: Config, world_size: int, per_node: int, device: Device) -> Found:
    """Check a run, build the model of every rank and count its memory.

    Raises:
        UserError: the first problem. `checking.check_fits` checks the memory.
    """
    hf_config, line = model_of(config.model.path)
    decided = check_run(hf_config, config, world_size, per_node, device)
    memory = tuple(rank_memory(hf_config, decided, world_size, device))
    models = build_models(hf_config, decided, world_size)
    _check_counts(hf_config, decided, models)
    idle = None if config.rollout.only else idle_replicas(decided, Layout.of(hf_config, decided, world_size))
    return Found(decided, hf_config, world_size, device, line, idle, models, memory)


def _check_counts(hf_config: Mapping[str, Any], config: Config, models: Models) -> None:
    """The parameters of the built models match the memory model and the size of the whole model."""
    expected = total_parameters(hf_config)
    assert models.total == expected, f"{models.total} parameters on all ranks, but {expected} in the model"
    for held in models.holdings:
        sizes = RankSizes.of(hf_config, config, held.position.pp)
        counted = (sizes.dense_parameters, sizes.expert_parameters)
        built = (held.dense, held.experts)
        assert built == counted, f"rank {held.ranks[0]} holds {built} parameters, but the memory model has {counted}"
