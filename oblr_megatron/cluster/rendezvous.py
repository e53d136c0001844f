"""The nodes of a job talking to one another before there is a process group: a store on the first node, with deadlines.

with Meeting(nodes, index, port, deadline_s) as meeting:
    reports = meeting.gather("report", text)        # {node index: text} on the first node, without the late ones
    verdict = meeting.tell("verdict", text)         # the first node's, on all of them
"""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from oblr_megatron.errors import RunError

FAREWELL_S = 10.0  # for the others to have heard the last word, before the store goes with the first node's process


class Rendezvous:
    """This node's part in it.

    Args:
        nodes: names, under which the first one is reached.
        index: of this node.
        port: of the store, on the first node.
        deadline_s: of every wait.

    Raises:
        RunError: the store cannot be opened, or did not answer in time.
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
            raise RunError(f"node {nodes[index]} did not meet {self.address} in {deadline_s:g} s: {reason}") from error

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Others leave a word; the first node waits for it."""
        if self.index:
            self.store.set(f"farewell/{self.index}", "")
        else:
            self._wait_for("farewell", FAREWELL_S)

    def gather(self, name: str, text: str, deadline_s: float | None = None) -> dict[int, str]:
        """What each node says; on the first node, of those that said it before the deadline. Others get their own."""
        self.store.set(f"{name}/{self.index}", text)
        if self.index:
            return {self.index: text}
        return self._wait_for(name, deadline_s or self.deadline_s)

    def tell(self, name: str, text: str, deadline_s: float | None = None) -> str:
        """What the first node says.

        Raises:
            RunError: it did not say it in time.
        """
        if self.index == 0:
            self.store.set(name, text)
            return text
        if not self._arrived(name, deadline_s or self.deadline_s):
            raise RunError(f"node {self.nodes[self.index]} heard no {name} from {self.address}")
        return self.store.get(name).decode()

    def clock_offsets(self, present: Collection[int]) -> dict[int, float]:
        """Seconds by which the clocks of those present are ahead of the first node's, there; good to half a round trip.

        The others answer, and get nothing.
        """
        if self.index:
            if self._arrived(f"ask/{self.index}", self.deadline_s):
                self.store.set(f"clock/{self.index}", repr(time.time()))
            return {}
        offsets = {0: 0.0}
        for node in sorted(set(present) - {0}):
            asked = time.time()
            self.store.set(f"ask/{node}", "")
            if self._arrived(f"clock/{node}", self.deadline_s):
                offsets[node] = float(self.store.get(f"clock/{node}")) - (asked + time.time()) / 2
        return offsets

    def _wait_for(self, name: str, seconds: float) -> dict[int, str]:
        end = time.monotonic() + seconds
        found = {}
        for node in range(len(self.nodes)):
            if (name != "farewell" or node) and self._arrived(f"{name}/{node}", max(0.05, end - time.monotonic())):
                found[node] = self.store.get(f"{name}/{node}").decode()
        return found

    def _arrived(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError):  # the deadline, or the store is gone
            return False
        return True
