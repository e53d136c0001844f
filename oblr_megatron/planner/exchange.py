"""Seconds of an exchange between ranks, and which links it goes over. Imports no torch.

    gather, scatter-and-add, all-to-all    (g - 1) / g * bytes / (link * bandwidth) + log2(g) * message
    all-reduce                             twice that: a scatter-and-add, then a gather

bytes: of the whole tensor, all g parts together. Ranks are laid out as megatron-core does: tensor, context, data, then
pipeline parallel, from neighbours outwards; a group that spans nodes goes at the speed of the links between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblr_megatron.config import ParallelConfig
    from oblr_megatron.planner.constants import Machine


@dataclass(frozen=True, slots=True)
class Links:
    """Sizes of a layout's groups, and the seconds of their exchanges."""

    machine: Machine
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, machine: Machine, parallel: ParallelConfig, world_size: int) -> Links:
        """Of a layout; it must have been checked (`checks.check_world_size`)."""
        tp, cp, pp = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        etp = parallel.expert_tensor_parallel_size or tp
        return cls(machine, tp, cp, world_size // (tp * cp * pp), pp, parallel.expert_model_parallel_size, etp)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.world_size // (self.ep * self.etp * self.pp))

    def tensor(self, num_bytes: float) -> float:
        """A gather, or a scatter-and-add, over tensor-parallel ranks."""
        return self._gather(num_bytes, self.tp, self.tp)

    def context(self, num_bytes: float) -> float:
        """The same over context-parallel ranks."""
        return self._gather(num_bytes, self.cp, self.tp * self.cp)

    def expert(self, num_bytes: float) -> float:
        """An all-to-all over expert-parallel ranks; bytes: what one rank sends, its own part included."""
        return self._gather(num_bytes, self.ep, self.etp * self.ep)

    def expert_tensor(self, num_bytes: float) -> float:
        """A gather, or a scatter-and-add, over the ranks that share an expert."""
        return self._gather(num_bytes, self.etp, self.etp)

    def data(self, num_bytes: float) -> float:
        """A gather, or a scatter-and-add, over the ranks that hold the same weights."""
        return self._gather(num_bytes, self.dp * self.cp, self.tp * self.cp * self.dp)

    def expert_data(self, num_bytes: float) -> float:
        """The same over the ranks that hold the same experts."""
        return self._gather(num_bytes, self.edp, self.world_size // self.pp)

    def next_stage(self, num_bytes: float) -> float:
        """One message to the next pipeline stage; between nodes where the run has several."""
        if self.pp == 1:
            return 0.0
        bandwidth, message = self._link(self.world_size)
        return num_bytes / bandwidth + message

    def model(self, num_bytes: float) -> float:
        """A gather of the whole model from the ranks that hold its parts."""
        span = self.world_size if self.pp > 1 else self.tp * self.ep
        return self._gather(num_bytes, self.tp * self.pp * self.ep, span)

    def _gather(self, num_bytes: float, size: int, span: int) -> float:
        """Seconds; `span`: neighbouring ranks that the group is spread over."""
        if size == 1:
            return 0.0
        bandwidth, message = self._link(span)
        return (size - 1) / size * num_bytes / bandwidth + log2(size) * message

    def _link(self, span: int) -> tuple[float, float]:
        """Bytes a second, and seconds of a message."""
        device, constants = self.machine.device, self.machine.constants
        if span > device.gpus_per_node:
            return device.inter_node_gb_s * 1e9 * constants.link, constants.node_message_s
        return device.intra_node_gb_s * 1e9 * constants.link, constants.message_s
