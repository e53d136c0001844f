"""vLLM weight-transfer engines for pushes (`vllm.distributed.weight_transfer`): the side that runs inside vLLM.

`oblr_shm`: shared memory, for engines on a CPU. `oblr_server_shm`: the same for a server on the trainer's machine.
`oblr_ipc`: vLLM's own CUDA IPC engine, made to recover from a broken push. A push is a start, any number of updates,
and a finish. Each message has its own answer, so neither side ever waits while it holds something that the other needs.
Completeness and versions are checked in `engine.state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from oblr_megatron.engine.adapter import staged
from oblr_megatron.errors import WeightError
from oblr_megatron.weights.engine_view import engine_tensors
from oblr_megatron.weights.manifest import parts_of
from oblr_megatron.weights.peer_memory import PeerMemory
from oblr_megatron.weights.shm import Bucket, SharedBuffer, read_bucket


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """The inherited file descriptor of the shared memory."""

    fd: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket, as `Bucket.update_info` describes it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]  # of whole tensors
    firsts: list[int]  # the first of their elements in the bucket
    counts: list[int]
    offsets: list[int]
    start: int
    used: int
    checksum: int | None

    def bucket(self) -> Bucket:
        """The bucket itself."""
        return Bucket(parts_of(vars(self)), tuple(self.offsets), self.start, self.used, self.checksum)


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Copies each bucket directly into the model's parameters.

    vLLM's `load_weights` needs whole tensors, so an embedding would need a bucket of its own size. After a broken push,
    vLLM's layer-wise reload would keep its element counts. Writing in place keeps no counts. A broken push leaves mixed
    weights, and the next complete push overwrites them.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffer: SharedBuffer | None = None
        self._tensors: dict[str, Tensor] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the trainer's memory, again after it grew; refuse a model that updates would not reach."""
        check_layers_read_parameters(self.model)
        if self._buffer is None:
            self._buffer = SharedBuffer(init_info.fd)
        self._buffer.map()

    def start_weight_update(self) -> None:
        """Nothing to prepare: the parameters are written in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class would then synchronize an accelerator, and a CPU engine has none.)"""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Check a bucket and copy its contents into the model."""
        assert self._buffer is not None, "init_transfer_engine comes first"
        for part, elements in read_bucket(update_info.bucket(), self._buffer):
            tensor = self._targets()[part.spec.name]
            if tensor.dtype != elements.dtype or tuple(tensor.shape) != part.spec.shape:
                raise WeightError(f"{part.spec} was sent for a parameter {tensor.dtype}{list(tensor.shape)}")
            tensor.view(-1)[part.first : part.first + part.count].copy_(elements)

    def _targets(self) -> dict[str, Tensor]:
        """The tensors that the open push fills."""
        adapter = staged(self.model)
        if adapter is not None:
            return adapter.tensors
        if self._tensors is None:
            self._tensors = engine_tensors(self.model)
        return self._tensors

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Unmap the memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class ServerShmWeightTransferEngine(ShmWeightTransferEngine):
    """`oblr_server_shm`: a server is not a child of the trainer, so it finds the memory through `PeerMemory`."""

    init_info_cls = PeerMemory  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._peer: PeerMemory | None = None

    def init_transfer_engine(self, init_info: PeerMemory) -> None:  # type: ignore[override]
        """Map the trainer's memory; again after it grew or the trainer changed."""
        check_layers_read_parameters(self.model)
        if self._peer != init_info:
            self.shutdown()
            self._buffer, self._peer = init_info.open(), init_info
        assert self._buffer is not None, "opened above"
        self._buffer.map()

    def shutdown(self) -> None:
        super().shutdown()
        self._peer = None


_NO_PLUGIN = "the plugin 'oblr_megatron' of vllm.general_plugins was not active when the model was loaded"


@torch.no_grad()
def check_layers_read_parameters(model: nn.Module) -> None:
    """Check that a CPU model computes with the parameters that a push writes.

    The check calls each linear layer with another weight. A layer with a packed copy ignores that weight and returns
    another product. Each mixture layer must use our `UnpackedExperts`.

    Raises:
        WeightError: a layer computes with a packed copy, or would misread what is pushed.
    """
    from oblr_megatron.engine.cpu.experts import UnpackedExperts

    for name, layer in model.named_modules():
        if hasattr(layer, "w13_weight"):
            quant_method: Any = layer.quant_method
            experts = quant_method.moe_kernel.fused_experts
            if not isinstance(experts, UnpackedExperts):
                kind = type(experts).__name__
                raise WeightError(
                    f"vLLM computes {name} with packed weights ({kind}) and misreads a push: {_NO_PLUGIN}"
                )
        product: Any = getattr(layer, "cpu_linear", None)
        weight: Any = getattr(layer, "weight", None)
        if product is None or weight is None:
            continue
        one, other = (weight.new_ones(rows, weight.shape[-1]) for rows in (1, 2))
        if weight.ndim != 2 or not torch.equal(product(one, other, None), one @ other.t()):
            raise WeightError(
                f"vLLM computes {name} with a packed copy of its weight, which a push does not reach: {_NO_PLUGIN}"
            )


class RestartableReload(WeightTransferEngine[Any, Any]):
    """Restarts vLLM's layer-wise reload after a push that broke off; a mixin for vLLM's own engines.

    The reload counts loaded elements. Unless the layers are restored first, the next push would add to the counts of
    the broken one and end with tensors of both. The tensors of an adapter go to its stage, without a reload.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open = False

    def start_weight_update(self) -> None:
        """Restore every layer's own tensors if the last push did not end, then prepare for this one."""
        if self._open:
            super().finish_weight_update()  # type: ignore[safe-super]
        adapter = staged(self.model)
        self._open = adapter is None
        if adapter is not None:
            self.model: Any = adapter  # until vLLM resets the target, after the update or its failure
            return
        super().start_weight_update()  # type: ignore[safe-super]

    def finish_weight_update(self) -> None:
        """End a complete push."""
        if self._open:
            super().finish_weight_update()  # type: ignore[safe-super]
        self._open = False


class RecoveringIpcWeightTransferEngine(RestartableReload, IPCWeightTransferEngine):
    """vLLM's CUDA IPC engine, which recovers from a push that broke off, and keeps no memory of the trainer mapped."""

    def update_weights(self, update_info: Any) -> None:
        """Load a bucket. A push that breaks off ends with a failing one."""
        try:
            super().update_weights(update_info)
        except BaseException:  # whatever broke the push: the mapping must go
            self._packed_importer.close()
            raise

    def finish_weight_update(self) -> None:
        """End a push. vLLM's own end is that of a reload, which an adapter has none of."""
        super().finish_weight_update()
        self._packed_importer.close()
