"""Exchanges text between the nodes of a job before there is a process group, through a store on the first node.

with Rendezvous(nodes, index, port, deadline_s) as rendezvous:
    reports = rendezvous.gather("report", text)      # {node index: text} on the first node, without late nodes
    outcome = rendezvous.tell("outcome", text)       # the first node's text, on all nodes
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from oblr_megatron.errors import RunError

FAREWELL_S = 10.0
"""The first node holds the store. It waits this long for the other nodes to finish reading."""
CLOCKS_S = 10.0  # for the clocks of all nodes together


class Rendezvous:
    """One node's connection to the store.

    Args:
        nodes: host names; the first one must be reachable.
        index: of this node.
        port: of the store, on the first node.
        deadline_s: of every wait.

    Raises:
        RunError: the store cannot be opened or reached in time.
    """

    def __init__(self, nodes: list[str], index: int, port: int, deadline_s: float) -> None:
        self.nodes, self.index, self.deadline_s = nodes, index, deadline_s
        self.address = f"{nodes[0]}:{port}"
        limit = timedelta(seconds=deadline_s)
        try:
            self.store = dist.TCPStore(
                nodes[0], port, is_master=index == 0, timeout=limit, wait_for_workers=False, multi_tenant=False
            )
        except (dist.DistError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(f"node {nodes[index]} cannot reach {self.address} in {deadline_s:g} s: {reason}") from error

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The first node waits until the other nodes have said farewell."""
        if self.index:
            self.store.set(f"farewell/{self.index}", "")
        else:
            self._wait_for("farewell", FAREWELL_S)

    def gather(self, name: str, text: str, deadline_s: float | None = None) -> dict[int, str]:
        """On the first node, the texts of all nodes that sent one in time; on others, only their own."""
        self.store.set(f"{name}/{self.index}", text)
        if self.index:
            return {self.index: text}
        return self._wait_for(name, deadline_s or self.deadline_s)

    def tell(self, name: str, text: str, deadline_s: float | None = None) -> str:
        """The first node's text, on all nodes.

        Raises:
            RunError: it did not arrive in time.
        """
        if self.index == 0:
            self.store.set(name, text)
            return text
        if not self._arrived(name, deadline_s or self.deadline_s):
            raise RunError(f"node {self.nodes[self.index]} received no {name} from {self.address}")
        return self.store.get(name).decode()

    def clock_offsets(self, present: Collection[int]) -> dict[int, float]:
        """On the first node, seconds by which the clocks of `present` nodes are ahead of its own; {} on others.

        The error is at most half a round trip.
        """
        if self.index:
            if self._arrived(f"ask/{self.index}", 2 * self.deadline_s):  # the first may wait for a silent node
                self.store.set(f"clock/{self.index}", repr(time.time()))
            return {}
        offsets = {0: 0.0}
        end = time.monotonic() + CLOCKS_S
        for node in sorted(set(present) - {0}):
            asked = time.time()
            self.store.set(f"ask/{node}", "")
            if self._arrived(f"clock/{node}", max(0.05, end - time.monotonic())):
                offsets[node] = float(self.store.get(f"clock/{node}")) - (asked + time.time()) / 2
        return offsets

    def _wait_for(self, name: str, seconds: float) -> dict[int, str]:
        end = time.monotonic() + seconds
        replies = {}
        for node in range(len(self.nodes)):
            if (name != "farewell" or node) and self._arrived(f"{name}/{node}", max(0.05, end - time.monotonic())):
                replies[node] = self.store.get(f"{name}/{node}").decode()
        return replies

    def _arrived(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError):  # the deadline passed, or the store is gone
            return False
        return True
