"""Ports for servers that a test starts later."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

FIRST, STRIDE = 15_000, 16  # workers of pytest-xdist; each has every 16th port


def free_port() -> int:
    """A port that nothing listens on, and that nothing else takes until its server starts, maybe a minute later.

    The kernel gives none of these to an outgoing connection or to port 0, and no other worker of this pytest has it.
    """
    return next(port for port in _ports if _is_free(port))


def _own_ports() -> list[int]:
    """Those of this worker, in an order of its own: two runs of pytest on a machine differ."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = kernels if kernels > FIRST else 2**16  # where the kernel gives away nearly all of them, none is safe
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(FIRST + worker % STRIDE, end, STRIDE))
    random.SystemRandom().shuffle(ports)
    return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


_ports = iter(_own_ports())  # none twice
