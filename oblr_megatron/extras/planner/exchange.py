"""Seconds of a collective among g ranks, and the links it uses. Imports no torch.

Bytes are those of the whole tensor, all g parts together. Ranks are ordered as in megatron-core: tensor, context, data,
then pipeline parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oblr_megatron.config import ParallelConfig
    from oblr_megatron.extras.planner.constants import PlannerMachine


@dataclass(frozen=True, slots=True)
class Links:
    """Sizes of a layout's groups, and the seconds of their collectives."""

    machine: PlannerMachine
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, machine: PlannerMachine, parallel: ParallelConfig, world_size: int) -> Links:
        """The links of a layout; `checks.layout.check_world_size` must have accepted it."""
        tp, cp, pp = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        etp = parallel.expert_tensor_parallel_size or tp
        return cls(machine, tp, cp, world_size // (tp * cp * pp), pp, parallel.expert_model_parallel_size, etp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.world_size // (self.ep * self.etp * self.pp))

    def tensor(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over tensor-parallel ranks."""
        return self._gather(num_bytes, self.tp, self.tp)

    @property
    def expert_copies(self) -> int:
        """Ranks of a replica that hold the same experts (`Parallel.expert_sum_group`)."""
        return max(1, self.tp * self.cp // (self.ep * self.etp))

    def context(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over context-parallel ranks."""
        return self._gather(num_bytes, self.cp, self.tp * self.cp)

    def ring(self, num_bytes: float) -> float:
        """Keys and values that go around the context-parallel ranks: between nodes through one network card."""
        if self.cp == 1:
            return 0.0
        span = self.tp * self.cp
        return (self.cp - 1) / self.cp * num_bytes / self._bandwidth(span) + self._hops(self.cp, span)

    def expert_sum(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over the ranks of a replica that hold the same experts."""
        return self._gather(num_bytes, self.expert_copies, self.tp * self.cp)

    def expert(self, num_bytes: float) -> float:
        """An all-to-all over expert-parallel ranks. Traffic within and between nodes overlaps: the slower one counts.

        Args:
            num_bytes: sent by one rank, its own part included.
        """
        if self.ep == 1:
            return 0.0
        here = min(self.ep, max(1, self.machine.device.gpus_per_node // self.etp))  # ranks of the group in a node
        within = self._bandwidth(here * self.etp)
        seconds = (here - 1) / self.ep * num_bytes / within
        if here < self.ep:
            between = self._bandwidth(self.ep * self.etp)
            copies = self.machine.constants.node_copies
            seconds = max(seconds, copies * (self.ep - here) / self.ep * num_bytes / between)
        return seconds + self._hops(self.ep, self.ep * self.etp)

    def expert_tensor(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over the ranks that share an expert."""
        return self._gather(num_bytes, self.etp, self.etp)

    def data(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over the ranks that hold the same weights."""
        return self._gather(num_bytes, self.dp * self.cp, self.tp * self.cp * self.dp)

    def expert_data(self, num_bytes: float) -> float:
        """An all-gather or reduce-scatter over the ranks that hold the same experts."""
        return self._gather(num_bytes, self.edp, self.world_size // self.pp)

    def next_stage(self, num_bytes: float) -> float:
        """One message to the next pipeline stage, between nodes if the run has several."""
        if self.pp == 1:
            return 0.0
        constants, device = self.machine.constants, self.machine.device
        within = self.world_size <= device.gpus_per_node
        message = constants.message_s if within else constants.node_message_s
        return num_bytes / self._bandwidth(self.world_size) + message

    def model(self, num_bytes: float) -> float:
        """An all-gather of the whole model from the ranks that hold its parts."""
        parts = max(self.tp, self.ep * self.etp)
        return self._gather(num_bytes, parts * self.pp, self.world_size if self.pp > 1 else parts)

    def between_nodes(self, num_bytes: float) -> float:
        """A pipelined broadcast from one device to any number of nodes."""
        device, constants = self.machine.device, self.machine.constants
        return num_bytes / (device.inter_node_gb_s * 1e9 * constants.link) + constants.node_message_s

    def _gather(self, num_bytes: float, size: int, span: int) -> float:
        """Seconds of an all-gather over `size` ranks that spread over `span` neighbouring ranks.

        Between nodes it goes through the network cards of all its ranks in a node.
        """
        if size == 1:
            return 0.0
        link, nodes = self._bandwidth(span), self._nodes(size, span)
        shared = link if nodes == 1 else min(self._bandwidth(1), link * (size // nodes))
        return (size - 1) / size * num_bytes / shared + self._hops(size, span)

    def _nodes(self, size: int, span: int) -> int:
        """Nodes over which the ranks spread."""
        return min(size, max(1, -(-span // self.machine.device.gpus_per_node)))

    def _bandwidth(self, span: int) -> float:
        """Bytes per second of the slowest links that `span` neighbouring ranks use."""
        device = self.machine.device
        between = span > device.gpus_per_node
        return (device.inter_node_gb_s if between else device.intra_node_gb_s) * 1e9 * self.machine.constants.link

    def _hops(self, size: int, span: int) -> float:
        """Latency among `size` ranks that spread over `span` neighbouring ones: within the nodes, then between them."""
        constants = self.machine.constants
        nodes = self._nodes(size, span)
        return log2(size / nodes) * constants.message_s + log2(nodes) * constants.node_message_s
