"""Two pushes into another process on the simulated device: vLLM's own receivers hold every byte, both times.

CUDA IPC is shared memory, and NCCL is gloo. The handles, buckets, checksums, the rendezvous and vLLM's reload are real.

Not covered: CUDA IPC and NCCL themselves, vLLM's models, several ranks.
"""

from __future__ import annotations

import json

import pytest

from tests.sim_cuda.launch import run


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_every_tensor_arrives(kind: str) -> None:
    done = run(["-m", "tests.sim_cuda.push", kind])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found == {"pushes": [{"tensors": 25, "different": 0}] * 2, "exit status": 0}
