"""vLLM's CPU worker, which fails or hangs in one call; and a server of such an engine.

    FAILING_CALL=/tmp/call       # in the engine's environment
    arm(Path("/tmp/call"), "execute_model", "RuntimeError")

The call that is armed removes the file first, so the next engine is healthy. As a command:

    python -m tests.e2e.failing_worker MODEL PORT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from oblr_megatron.engine.http_door import run
from oblr_megatron.engine.protocol import API_KEY, EngineSpec
from oblr_megatron.runtime.processes import die_with

VARIABLE = "FAILING_CALL"
WORKER = {"worker_cls": "tests.e2e.failing_worker.FailingWorker"}
"""The option of vLLM's engine. Configs and command lines refuse it."""
HANG = "hang"
KINDS = {"RuntimeError": RuntimeError, "ValueError": ValueError, "AssertionError": AssertionError}


def arm(file: Path, method: str, how: str = "RuntimeError") -> None:
    """Let the next call of this method raise such an error, or never return."""
    written = file.with_suffix(".new")
    written.write_text(f"{method} {how}")
    written.replace(file)


class FailingWorker(CPUWorker):
    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        _fail("execute_model")
        return super().execute_model(*arguments, **options)

    def update_weights(self, *arguments: Any, **options: Any) -> Any:
        _fail("update_weights")
        return super().update_weights(*arguments, **options)

    def sleep(self, *arguments: Any, **options: Any) -> Any:
        _fail("sleep")
        return super().sleep(*arguments, **options)


def _fail(method: str) -> None:
    file = Path(os.environ[VARIABLE])
    if not file.exists() or file.read_text().split()[0] != method:
        return
    how = file.read_text().split()[1]
    file.unlink()
    while how == HANG:
        time.sleep(1)
    raise KINDS[how]("CUDA error: an illegal memory access was encountered")


def main(arguments: Sequence[str]) -> int:
    """As `oblr-megatron serve`."""
    die_with(os.getppid())
    model, port = arguments
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 256, "kv_cache_bytes": 2**27, "num_threads": 1}
    spec = EngineSpec("server", Path(model), "float32", "cpu", **sizes, server=True, vllm=WORKER)
    return run(spec, "127.0.0.1", int(port), os.environ.pop(API_KEY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
