"""Hosts as network namespaces on one switch, and disturbances of their network; inside of hosts.sh only.

    trainer, server = Host("trainer"), Host("server")               # of those that hosts.sh was given
    job = trainer.popen(["-m", "oblr_megatron.cli", "train", ...], log, {})
    with server.cut("drop", "POST /oblr/finish_push", 3) as cut:    # from the third packet that holds this text
        cut.wait(job, 60)
        time.sleep(2)

The switch is this process's own namespace, so that a test reaches every host.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tests.distributed.launch import PRELOAD
from tests.e2e import forked_processes
from tests.e2e.conftest import ROOT, environment
from tests.e2e.forked_processes import Forked

How = Literal["drop", "reject", "half-open", "unplug", "slow", "unnamed"]
"""All packets are lost, or answered with a reset; one connection is lost, and new ones work; the cable is out; SLOW
bytes arrive each second; the hosts do not know the host's name."""
TARGETS = {"drop": ["DROP"], "half-open": ["DROP"], "reject": ["REJECT", "--reject-with", "tcp-reset"]}
SLOW = "2kb/s"
POLL_S = 0.02
HOSTS = Path("/etc/hosts")
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000  # linux/sched.h


def run(*command: str) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


class Host:
    """A host that hosts.sh made; processes that it starts see its network and its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = next(line.split()[0] for line in HOSTS.read_text().splitlines() if line.split()[1:] == [name])

    def publish(self, known: bool) -> None:
        """Let the hosts know its address by its name, or forget it."""
        line = f"{self.address} {self.name}\n"
        HOSTS.write_text(HOSTS.read_text().replace(line, "") + line * known)  # in place: the file is a mount

    def run(self, *command: str) -> str:
        """Output of a command on this host."""
        return run("nsenter", f"--net=/run/netns/{self.name}", *command)

    def popen(self, words: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Start `python WORDS...` from the repository's root; it is forked from what has imported torch and vLLM."""
        with log.open("ab") as output:
            return self.forked(
                [sys.executable, *words],
                cwd=ROOT,
                env={**environment(), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(),
            )

    @cached_property
    def forked(self) -> type[Forked]:
        """`Popen` of a command on this host."""
        own, other = socket.socketpair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        context.Process(target=_keep_on, args=(other, self.name), daemon=True).start()
        other.close()
        return type("ForkedOnHost", (Forked,), {"keeper": staticmethod(lambda: own)})

    @contextmanager
    def cut(
        self, how: How, at: str = "", nth: int = 1, *, before: bool = False, peer: Host | None = None
    ) -> Iterator[Cut]:
        """Disturb the network of this host until the end of the block.

        Args:
            how: see `How`.
            at: from the first packet with this text that arrives here, and only between this host and its sender;
                without a text everything from now on.
            nth: of the packets with the text, the one that counts.
            before: lose this packet, too.
            peer: drop and reject only between this host and that one.
        """
        cut = Cut(self, how, at, peer)
        try:
            cut.begin(nth, before)
            yield cut
        finally:
            cut.heal()


class Cut:
    """A disturbance of a host's network; see `Host.cut`."""

    _number = 0

    def __init__(self, host: Host, how: How, at: str, peer: Host | None) -> None:
        self.host, self.how, self.at, self.peer = host, how, at, peer
        Cut._number += 1
        self.list = f"cut{Cut._number}"  # of xt_recent; a list outlives its rules

    def begin(self, nth: int, before: bool) -> None:
        """Make the rules. They hold from the moment when the list has the sender, or its connection has the mark."""
        if not self.at:
            self._act()
        target = TARGETS.get(self.how)
        if target is not None:
            resets = ["!", "--tcp-flags", "RST", "RST"] if self.how == "reject" else []  # which REJECT itself sends
            for chain, side in (("INPUT", "--rsource"), ("OUTPUT", "--rdest")):
                own = resets if chain == "OUTPUT" else []
                match = ["-m", "recent", "--name", self.list, "--rcheck", side] if self.at else []
                match = ["-m", "connmark", "--mark", "1"] if self.how == "half-open" else match
                self._append(chain, *own, *match, "-j", *target)
        if self.at:
            match = ["-m", "string", "--algo", "bm", "--string", self.at]
            match += ["-m", "statistic", "--mode", "nth", "--every", "100000", "--packet", str(nth - 1)]
            match += ["-m", "recent", "--name", self.list, "--set", "--rsource"]
            last = ["-j", *(target or ["DROP"])] if before else []
            self._append("INPUT", *match, *(["-j", "CONNMARK", "--set-mark", "1"] if self.how == "half-open" else last))

    def _append(self, chain: str, *rule: str) -> None:
        arrives = chain == "INPUT"
        match = ["-i" if arrives else "-o", "eth0", "-p", "tcp"]
        if self.peer is not None:
            match += ["-s" if arrives else "-d", self.peer.address]
        self.host.run("iptables", "-w", "-A", chain, *match, *rule)

    def _act(self) -> None:
        """What iptables cannot do by itself."""
        if self.how == "unplug":
            run("ip", "link", "set", self.host.name, "down")
        elif self.how == "slow":
            limit = ["--hashlimit-above", SLOW, "--hashlimit-mode", "dstip", "--hashlimit-name", self.list]
            self._append("INPUT", "-m", "hashlimit", *limit, "-j", "DROP")
        elif self.how == "unnamed":
            self.host.publish(False)

    def begun(self) -> bool:
        """Whether the packet has come; without one the disturbance begins at once."""
        return not self.at or bool(self.host.run("cat", f"/proc/net/xt_recent/{self.list}").strip())

    def wait(self, job: subprocess.Popen[Any], seconds: float) -> None:
        """Wait until it has begun, or the job has ended."""
        end = time.monotonic() + seconds
        while not self.begun() and job.poll() is None:
            assert time.monotonic() < end, f"no packet with {self.at!r} came"
            time.sleep(POLL_S)
        if self.at:
            self._act()

    def heal(self) -> None:
        """End the disturbance; harmless when it has ended."""
        self.host.run("iptables", "-w", "-F")
        if self.how == "unplug":
            run("ip", "link", "set", self.host.name, "up")
        elif self.how == "unnamed":
            self.host.publish(True)


def _keep_on(requests: socket.socket, name: str) -> None:
    """Serve `forked_processes` on a host."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python has these calls from 3.12 on
    with Path(f"/run/netns/{name}").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot become host {name}")
    socket.sethostname(name)
    forked_processes._keep(requests)


def left_behind(marker: str, seconds: float = 10.0) -> list[str]:
    """Command lines of processes with a variable of this value that still live after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marker.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)
