"""Run in a process with the simulated device: two pushes into another process with vLLM's own receivers.

    python -m tests.sim_cuda.push {ipc,nccl}

`ipc` is colocated, on the same GPU; `nccl` goes to another one. vLLM's layer-wise reload loads what arrives into a
model of transformers. Prints for each push how many tensors there are, and how many differ.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import tempfile
import uuid
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from transformers import AutoConfig, Qwen3ForCausalLM
from vllm.distributed.device_communicators import pynccl
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig, ParallelConfig, WeightsConfig
from oblr_megatron.engine.transfer import RecoveringIpcWeightTransferEngine
from oblr_megatron.engine.transfer_nccl import CheckedNcclWeightTransferEngine
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout.nccl_push import NcclTransport
from oblr_megatron.rollout.push import Pusher
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.shm import HALVES, fill_buckets
from oblr_megatron.weights.verify import digest
from tests.tiny import make_hf_dir

ANSWER_S = 120.0
BUCKET_BYTES = 2**21
SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
ENGINES: dict[str, tuple[Any, int]] = {
    "ipc": (RecoveringIpcWeightTransferEngine, 0),
    "nccl": (CheckedNcclWeightTransferEngine, 1),
}
"""The receiver's class and its GPU; the trainer has GPU 0."""


class Library:
    """NCCL's functions that vLLM's communicator calls, over gloo: a pointer to the device is one to the host."""

    @classmethod
    def install(cls) -> None:
        """Use it in this process; vLLM built for CPUs has no streams."""
        pynccl.NCCLLibrary, pynccl.current_stream = (lambda path: cls()), torch.cuda.current_stream

    def ncclGetRawVersion(self) -> int:
        return 22900

    def ncclGetVersion(self) -> str:
        return "2.29.0"

    def ncclGetUniqueId(self) -> Any:
        return pynccl.ncclUniqueId.from_buffer_copy(uuid.uuid4().hex.encode().ljust(pynccl.NCCL_UNIQUE_ID_BYTES, b"\0"))

    def ncclCommInitRank(self, world_size: int, unique_id: Any, rank: int) -> Any:
        name = bytes(unique_id).rstrip(b"\0").decode()
        store = dist.FileStore(str(Path(tempfile.gettempdir(), name)), world_size)
        group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=ANSWER_S))
        return SimpleNamespace(group=group, rank=rank, pending=[])

    def ncclAllReduce(self, sent: Any, received: Any, count: int, dtype: int, op: int, comm: Any, stream: Any) -> None:
        assert dtype == pynccl.ncclDataTypeEnum.ncclFloat32 and op == pynccl.ncclRedOpTypeEnum.ncclSum
        target = _bytes_at(received, 4 * count).copy_(_bytes_at(sent, 4 * count))
        comm.group.allreduce([target.view(torch.float32)]).wait()

    def ncclBroadcast(
        self, sent: Any, received: Any, count: int, dtype: int, root: int, comm: Any, stream: Any
    ) -> None:
        assert dtype == pynccl.ncclDataTypeEnum.ncclUint8
        data = _bytes_at(sent if comm.rank == root else received, count)
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = comm.group.broadcast([data], options)
        comm.pending.append(work) if comm.rank == root else work.wait()  # a sender's host goes on

    def ncclCommAbort(self, comm: Any) -> None:
        comm.group = None


def _bytes_at(pointer: ctypes.c_void_p, count: int) -> Tensor:
    assert pointer.value is not None
    return torch.frombuffer((ctypes.c_char * count).from_address(pointer.value), dtype=torch.uint8)


class Model(Qwen3ForCausalLM):
    """Loads as vLLM's models do, so that its reload can step in."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


class Across:
    """What a push calls of `VllmEngine`; the engine is in the process behind the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.lost = pipe, False
        self.spec, self.deadlines = SimpleNamespace(name="the engine"), SimpleNamespace(push=ANSWER_S)

    def wait_ready(self) -> None:
        pass

    def post(self, method: str, arguments: dict[str, Any], **_: Any) -> None:
        self.pipe.send((method, arguments))

    def collect(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError("the receiver does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, method: str, **arguments: Any) -> Any:
        self.post(method, arguments)
        return self.collect()


def receive(pipe: Connection, kind: str, path: Path) -> None:
    """The other process: answers the calls of pushes until it receives None."""
    kind_of_engine, index = ENGINES[kind]
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    Library.install()
    torch.manual_seed(7)
    model = Model(AutoConfig.from_pretrained(path)).to(torch.bfloat16).to(device).requires_grad_(False)
    with device:
        record_metadata_for_reloading(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    engine = kind_of_engine(None, SimpleNamespace(parallel_config=parallel, model_config=None), device, model)
    answers = {
        "open_push": lambda init_info: engine.init_transfer_engine(engine.parse_init_info(init_info)),
        "start_push": lambda **_: engine.start_weight_update(),
        "update_push": lambda update_info, **_: engine.update_weights(update_info),
        "finish_push": lambda **_: engine.finish_weight_update(),
        "digests": lambda: {name: digest(weight) for name, weight in model.named_parameters()},
    }
    while (message := pipe.recv()) is not None:
        method, arguments = message
        try:
            pipe.send(answers[method](**arguments))
        except Exception as error:  # noqa: BLE001  the other side raises it
            pipe.send(error)
    engine.shutdown()


def broadcast(transport: NcclTransport, source: Any, engine: Across) -> None:
    """What `ServerReceiver` does with one server, which answers over the pipe instead of HTTP."""
    server: Any = SimpleNamespace(url="http://127.0.0.1:1", workers=1, instance="1")

    async def open_push(info: dict[str, Any]) -> None:
        await asyncio.to_thread(engine.call, "open_push", init_info=info)

    capacity = transport.capacity(manifest_of(source))
    buffer = transport.reserve(HALVES * capacity)
    asyncio.run(transport.connect(server, open_push))
    engine.call("start_push")
    for bucket in fill_buckets(source, capacity, buffer):
        engine.post("update_push", {"update_info": bucket.update_info()})
        transport.send(bucket, [server])
        engine.collect()
    engine.call("finish_push")


def main(kind: str) -> None:
    """Push the weights, change them, and push again."""
    parallel = initialize(ParallelConfig())
    Library.install()
    with tempfile.TemporaryDirectory() as directory:
        path = make_hf_dir(Path(directory) / "model", **SIZES)
        config = ModelConfig.model_validate({"path": path, "dtype": "bfloat16", "transformer_impl": "local"})
        policy = build_policy(AutoConfig.from_pretrained(path), config, parallel)
        load_hf_weights(policy, path)
        source = MegatronWeights(policy)
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=receive, args=(other, kind, path), daemon=True)
        process.start()
        other.close()
        engine: Any = Across(pipe)
        pusher = Pusher(engine, parallel.device, WeightsConfig())
        transport = NcclTransport(BUCKET_BYTES, parallel.device, ANSWER_S)
        found = []
        for version in (1, 2):
            pusher.push(source, version) if kind == "ipc" else broadcast(transport, source, engine)
            held, expected = engine.call("digests"), {name: digest(tensor) for name, tensor in source}
            different = sum(held.get(name) != value for name, value in expected.items())
            found.append({"tensors": len(expected), "different": different})
            for _, parameter in policy.named_parameters():
                parameter.detach().mul_(1.5)
        transport.close()
        pipe.send(None)
        process.join(ANSWER_S)
    print(json.dumps({"pushes": found, "exit status": process.exitcode}))
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
