"""Both sides of a push, in the shape of vLLM's weight-transfer API (`vllm.distributed.weight_transfer`).

`oblr_shm`: shared memory, for engines on a CPU. `oblr_ipc`: vLLM's own CUDA IPC engine, which also recovers from a push
that broke off. Either way a push is start, any number of updates, finish, and the engine answers each message alone, so
neither side ever waits for the other while it holds something the other needs. Completeness, versions and the refusal
to serve half a model are the engine process's part (`rollout.vllm_process`); here are the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
)

from oblr_megatron.engine.plugin import IPC_BACKEND, SHM_BACKEND
from oblr_megatron.errors import WeightError
from oblr_megatron.weights.engine_view import engine_tensors
from oblr_megatron.weights.manifest import Part, TensorSpec, manifest_of
from oblr_megatron.weights.shm import (
    DEFAULT_BUCKET_BYTES,
    HALVES,
    Bucket,
    SharedBuffer,
    bucket_capacity,
    fill_buckets,
    read_bucket,
)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Tells the engine which inherited descriptor the weights come through."""

    fd: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket that lies in the shared memory; the first three fields are those of vLLM's own backends."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]  # of whole tensors
    firsts: list[int]  # which of their elements are in the bucket
    counts: list[int]
    offsets: list[int]
    start: int
    used: int
    checksum: int | None

    @classmethod
    def of(cls, bucket: Bucket) -> ShmUpdateInfo:
        """A bucket, spread out into plain lists."""
        return cls(
            names=[part.spec.name for part in bucket.parts],
            dtype_names=[part.spec.dtype for part in bucket.parts],
            shapes=[list(part.spec.shape) for part in bucket.parts],
            firsts=[part.first for part in bucket.parts],
            counts=[part.count for part in bucket.parts],
            offsets=list(bucket.offsets),
            start=bucket.start,
            used=bucket.used,
            checksum=bucket.checksum,
        )

    def bucket(self) -> Bucket:
        """The bucket again."""
        return Bucket(parts_of(vars(self)), tuple(self.offsets), self.start, self.used, self.checksum)


def parts_of(update_info: dict[str, Any]) -> tuple[Part, ...]:
    """What an update holds, of our backend or of vLLM's IPC one, which sends whole tensors only."""
    fields = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in zip(*fields, strict=True)]
    if "firsts" not in update_info:
        return tuple(Part.whole(spec) for spec in specs)
    return tuple(map(Part, specs, update_info["firsts"], update_info["counts"]))


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Engine side: copies each bucket straight into the model's parameters.

    Straight, and not through vLLM's `load_weights`, which wants whole tensors: an embedding would need a bucket of its
    own size. Nor through its layer-wise reload: a push that breaks off leaves parameters of two versions behind, which
    the next complete push overwrites, whereas the reload would keep the first push's count of loaded elements.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffer: SharedBuffer | None = None
        self._tensors: dict[str, Tensor] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the trainer's memory, or map it again after it grew; refuse a model that updates would not reach."""
        check_layers_read_parameters(self.model)
        if self._buffer is None:
            self._buffer = SharedBuffer(init_info.fd)
        self._buffer.map()

    def start_weight_update(self) -> None:
        """Nothing to prepare: the parameters are written in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. (The base class would go on to synchronize an accelerator that is not there.)"""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Check a bucket and copy its contents into the model."""
        assert self._buffer is not None, "init_transfer_engine comes first"
        if self._tensors is None:
            self._tensors = engine_tensors(self.model)
        for part, elements in read_bucket(update_info.bucket(), self._buffer):
            tensor = self._tensors[part.spec.name]
            if tensor.dtype != elements.dtype or tuple(tensor.shape) != part.spec.shape:
                raise WeightError(f"{part.spec} came for {tensor.dtype}{list(tensor.shape)}")
            tensor.view(-1)[part.first : part.first + part.count].copy_(elements)

    def finish_weight_update(self) -> None:
        """Nothing to finish either."""

    def shutdown(self) -> None:
        """Unmap the memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


@torch.no_grad()
def check_layers_read_parameters(model: nn.Module) -> None:
    """Ask each linear layer to multiply by a weight that is not its own (one that holds a packed copy cannot), and each
    layer's experts what computes them.

    Args:
        model: a vLLM model on a CPU.

    Raises:
        WeightError: a layer computes with a copy of its weight that updates do not reach, or misreads them.
    """
    for name, layer in model.named_modules():
        if hasattr(layer, "w13_weight"):
            _check_experts_read_parameters(name, layer)
        product: Any = getattr(layer, "cpu_linear", None)
        weight: Any = getattr(layer, "weight", None)
        if product is None or weight is None:
            continue
        one, other = (weight.new_ones(rows, weight.shape[-1]) for rows in (1, 2))
        if weight.ndim != 2 or not torch.equal(product(one, other, None), one @ other.t()):
            raise WeightError(
                f"vLLM computes {name} with a packed copy of its weight, which a push does not reach: the plugin "
                "'oblr_megatron' of vllm.general_plugins did not take effect before the model was loaded"
            )


def _check_experts_read_parameters(name: str, layer: Any) -> None:
    """Whether one layer's experts are those that read what was loaded or pushed: vLLM's own pack it in place."""
    from oblr_megatron.engine.experts import UnpackedExperts

    experts = layer.quant_method.moe_kernel.fused_experts
    if not isinstance(experts, UnpackedExperts):
        raise WeightError(
            f"vLLM computes {name} with packed weights ({type(experts).__name__}), which a push would be misread as: "
            "the plugin 'oblr_megatron' of vllm.general_plugins did not take effect before the model was loaded"
        )


class RestartableReload(WeightTransferEngine[Any, Any]):
    """Starts vLLM's layer-wise reload afresh after a push that broke off; stands before one of vLLM's own engines.

    The reload counts loaded elements; without putting the layers back first, a later push would add to the counts of
    the broken one and end with tensors of both.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open = False

    def start_weight_update(self) -> None:
        """Put every layer's own tensors back if the last push did not end, then prepare for this one."""
        if self._open:
            super().finish_weight_update()  # type: ignore[safe-super]
        self._open = True
        super().start_weight_update()  # type: ignore[safe-super]

    def finish_weight_update(self) -> None:
        """End a complete push."""
        super().finish_weight_update()  # type: ignore[safe-super]
        self._open = False


class RecoveringIpcWeightTransferEngine(RestartableReload, IPCWeightTransferEngine):
    """vLLM's CUDA IPC engine, which recovers from a push that broke off."""


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """Trainer side of `oblr_shm`: `rank` is 0 on the rank that feeds the engine, and that one holds the buffer."""

    backend: ClassVar[str] = SHM_BACKEND
    buffer: SharedBuffer | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    checksum: bool = True


class ShmTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Trainer side: gathers a bucket with all ranks, and only then, on the feeding rank, speaks to the engine."""

    init_info_cls = ShmTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
        is_sender: bool = True,
        buffer: SharedBuffer | None = None,
        capacity: int = DEFAULT_BUCKET_BYTES,
        checksum: bool = True,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._buffer, self._capacity, self._checksum = buffer, capacity, checksum

    @classmethod
    def trainer_init(
        cls, init_info: ShmTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> ShmTrainerWeightTransferEngine:
        """Size the shared memory for this source and have the engine map it."""
        if source is None:
            raise ValueError("oblr_shm sends whole models: it needs a WeightSource")
        buffer = init_info.buffer if init_info.is_sender else None
        capacity = bucket_capacity(manifest_of(source), init_info.bucket_bytes)
        if buffer is not None:
            buffer.reserve(HALVES * capacity)
            client.init_weight_transfer_engine({"fd": buffer.fd})
        return cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            buffer=buffer,
            capacity=capacity,
            checksum=init_info.checksum,
        )

    def send_weights(self) -> None:
        """Push the whole source once; every rank iterates it to its end."""
        assert self.source is not None, "trainer_init sets it"
        buckets = fill_buckets(self.source, self._capacity, self._buffer, checksum=self._checksum)
        for index, bucket in enumerate(buckets):
            if self.is_sender:
                if index == 0:
                    self.client.start_weight_update()
                self.client.update_weights(vars(ShmUpdateInfo.of(bucket)))
        if self.is_sender:
            self.client.finish_weight_update()


@dataclass
class IpcTrainerInitInfo(IPCTrainerInitInfo):
    """Trainer side of `oblr_ipc`; every rank contributes the handle of its own GPU's copy."""

    backend: ClassVar[str] = IPC_BACKEND
    packed: bool = True


class IpcTrainerWeightTransferEngine(IPCTrainerWeightTransferEngine):
    """vLLM's own, under the name of the engine side that it feeds."""

    init_info_cls = IpcTrainerInitInfo
