"""Real API servers for tests: `oblr-megatron serve`, started as a user does, or forked (forked_processes.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from oblr_megatron.engine import handle
from oblr_megatron.engine.http_messages import PATHS, Info
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.net.hosts import Host

KEY = "a-key-of-the-tests-0123456789"
START_SECONDS = 500  # for a busy machine; 20 to 60 on a quiet one


class ApiServer:
    """One server process, which can be ended and restarted on its port.

    A block of `with` begins when it is ready, and ends it.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        key: str = KEY,
        max_model_len: int = 64,
        options: Sequence[str] = (),
        *,
        forked: bool = True,
        host: Host | None = None,
    ) -> None:
        self._popen = host.forked if host else handle.Popen if forked else subprocess.Popen
        self.model, self.log, self.key, self.max_model_len, self.options = model, log, key, max_model_len, options
        self.port, self.address = free_port(), host.address if host else "127.0.0.1"
        self.url = f"http://{self.address}:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "oblr_megatron.cli", "serve", "--model", str(self.model)]
        command += ["--host", self.address, "--port", str(self.port), "--max-model-len", str(self.max_model_len)]
        command += ["--kv-cache-gib", "0.1", "--num-threads", "1", *self.options]
        environment = os.environ | {"OBLR_API_KEY": self.key, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as output:
            self.process = self._popen(
                [*command, "--die-with-parent"], env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=()
            )

    def __enter__(self) -> ApiServer:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.call("/health")[0] != 200:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.3)

    def call(self, path: str, body: bytes | None = None, key: str | None = None, **headers: str) -> tuple[int, str]:
        """(HTTP status, text); status 0 if there is no answer."""
        key = self.key if key is None else key
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def generated(self) -> int:
        """Tokens sampled since it was started."""
        return self.info().generated

    def info(self) -> Info:
        """What it says about itself."""
        return Info.model_validate_json(self.call(PATHS["info"])[1])

    def family(self) -> list[psutil.Process]:
        """Its process and all descendants."""
        try:
            return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait until the whole family has ended; returns the exit status."""
        family = self.family()
        self.process.send_signal(number)
        status = self.process.wait(60)
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert not alive, f"left behind: {alive}"
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
