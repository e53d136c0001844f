"""One push of weights: all ranks gather the tensors in lockstep, and ranks with a receiver send them to engines.

    receiver = EngineReceiver(engine, manifest, version=3)   # or `ServerReceiver`, or `Receiver` if it has no engine
    stats = push(receiver, source, capacity, verify=False)

A rank that left a push early would leave the others in the middle of a gather. So a receiver does not raise during a
push. It keeps its first error and sends nothing more; `push` raises the error when all ranks have gathered everything.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.protocol import PushStats
from oblr_megatron.errors import EngineLostError, RunError, WeightError
from oblr_megatron.memory.buffer_sizes import BUCKET_BYTES
from oblr_megatron.weights.manifest import Manifest, Source, manifest_of
from oblr_megatron.weights.names import read_shape
from oblr_megatron.weights.shm import HALVES, Bucket, SharedBuffer, bucket_capacity, fill_buckets
from oblr_megatron.weights.verify import Digests, expected_digests, first_difference

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    from oblr_megatron.config.rollout import WeightsConfig
    from oblr_megatron.engine.handle import VllmEngine


def push(receiver: Receiver, source: Source, capacity: int, *, verify: bool) -> PushStats | None:
    """Send all tensors in buckets, on every rank. The source is iterated to its end, whatever the engines do.

    Args:
        receiver: of this rank, made for this push.
        source: collective over the ranks that share its tensors.
        capacity: bytes of a bucket.
        verify: gather once more, and compare with what the engines read back.

    Returns:
        What was moved; None on a rank without engines.

    Raises:
        RunError: an engine did not take the weights. It refuses to generate until a complete push.
    """

    def send() -> None:
        buffer = receiver.start(capacity)
        for bucket in fill_buckets(source, capacity, buffer):
            receiver.update(bucket)
        receiver.finish()

    return _run(receiver, source, send, verify=verify)


def _run(receiver: Receiver, source: Source, send: Callable[[], None], *, verify: bool) -> PushStats | None:
    try:
        send()
        if verify:
            receiver.verify(source)
    except BaseException as error:  # the engine must leave its open push, whatever ended the sender
        receiver.abort(f"the trainer broke off: {error!r}")
        raise
    return receiver.result()


def check_digests(engine: str, expected: Sequence[Digests], held: Sequence[Digests]) -> None:
    """Raise a `WeightError` about the first tensor that an engine read back otherwise than it was pushed."""
    different = first_difference(expected, held)
    if different is not None:
        raise WeightError(f"{engine}: {different} differs from the pushed tensor (weights.verify)")


class Receiver:
    """Where a rank sends one push. This base class is for a rank without engines: it gathers and sends nothing."""

    error: Exception | None = None
    """Why nothing more is sent."""

    def start(self, capacity: int) -> SharedBuffer | None:
        """Tell the engines that the push begins. Returns the buffer for the buckets; None if none is needed."""
        return None

    def update(self, bucket: Bucket) -> None:
        """Send a bucket, once the engines are done with the one before."""

    def finish(self) -> None:
        """Tell the engines that all buckets have been sent."""

    def verify(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Gather once more, and compare with what the engines read back."""
        for _ in source:
            pass

    def abort(self, reason: str) -> None:
        """Make the engines refuse to generate until a later push succeeds."""

    def result(self) -> PushStats | None:
        """Statistics of the push. Raises its first error, if there was one."""
        return None


class LockstepReceiver(Receiver, ABC):
    """Keeps the first error of a push, and does nothing after it."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.buckets, self.begin, self.end = 0, time.monotonic(), 0.0

    def attempt(self, call: Callable[[], Any]) -> None:
        """Call unless the push has failed already; an error of the call is kept."""
        if self.error is None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  any error: the other ranks still gather; `result` raises it
                self.error = error

    def verify(self, source: Iterable[tuple[str, Tensor]]) -> None:
        rest = iter(source)
        self.attempt(lambda: self.compare(rest))
        for _ in rest:  # the other ranks still gather
            pass

    @abstractmethod
    def compare(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """`verify` without its promise: an error may leave the source in the middle."""

    def result(self) -> PushStats | None:
        if self.error is not None:
            self.abort(str(self.error))
            raise self.error
        num_bytes = sum(spec.num_bytes for spec in self._manifest)
        return PushStats(num_bytes, self.end - self.begin, len(self._manifest), self.buckets)


class EngineReceiver(LockstepReceiver):
    """Sends to the engine process of this rank. It is also the `VLLMWeightSyncClient` of vLLM's own senders."""

    def __init__(
        self, engine: VllmEngine, manifest: Manifest, version: int, *, opened: int = 0, overlap: bool = True
    ) -> None:
        """Args:
        opened: bytes of the buckets that the engine is prepared for already.
        overlap: await the answer to an update only before the next message, so that the engine loads one bucket
            while the trainer gathers the next.
        """
        super().__init__(manifest)
        self._engine, self._opened, self._overlap = engine, opened, overlap
        self._holding = Holding(version=version)
        self._unanswered = False
        self.attempt(engine.wait_ready)
        if engine.lost and self.error is None:  # its buffer is closed
            self.error = EngineLostError(f"{engine.spec.name} was lost before push {version}")
        self.begin = time.monotonic()  # an engine that is starting has a deadline of its own

    def start(self, capacity: int) -> SharedBuffer | None:
        buffer = self._engine.buffer
        if self._opened != capacity:
            self.attempt(lambda: buffer.reserve(HALVES * capacity))
            self.init_weight_transfer_engine({"fd": buffer.fd})
        self.start_weight_update()
        return buffer if self.error is None else None  # a lost engine has closed its buffer

    def update(self, bucket: Bucket) -> None:
        self.attempt(lambda: self.update_weights(bucket.update_info()))

    def finish(self) -> None:
        self.finish_weight_update()

    def compare(self, source: Iterable[tuple[str, Tensor]]) -> None:
        spec = self._engine.spec
        workers = spec.tensor_parallel_size
        expected = expected_digests(source, read_shape(spec.model), {workers}, spec.lora)[workers]
        check_digests(spec.name, expected, self._call("digests", begin=time.monotonic()))

    def abort(self, reason: str) -> None:
        with suppress(RunError):  # an answer to a push that is given up
            self._settle()
        if not self._engine.lost:
            reason = f"push {self._holding.version} failed: {reason}"
            with suppress(RunError):  # the engine died meanwhile: a dead engine generates nothing
                self._call("abort_push", reason=reason, begin=time.monotonic())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Part of vLLM's protocol."""
        self.attempt(lambda: self._call("open_push", init_info=init_info))

    def start_weight_update(self) -> None:
        """Part of vLLM's protocol."""
        self.attempt(lambda: self._call("start_push", holding=self._holding, manifest=self._manifest))

    def update_weights(self, update_info: Any) -> None:
        """Part of vLLM's protocol. With overlap the engine may still be loading this update, but no earlier one."""
        self.buckets += 1
        arguments = {"holding": self._holding, "update_info": update_info}
        self.attempt(lambda: self._call("update_push", wait=not self._overlap, **arguments))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Part of vLLM's protocol."""
        self.attempt(lambda: self._call("finish_push", holding=self._holding))
        self.end = time.monotonic()

    def _call(self, method: str, *, begin: float | None = None, wait: bool = True, **arguments: Any) -> Any:
        """Post a message after the previous one was answered. Its deadline counts from `begin`, or from the push's."""
        self._settle()
        what = f"push {self._holding.version}"
        seconds, begin = self._engine.deadlines.push, self.begin if begin is None else begin
        self._engine.post(method, arguments, what=what, seconds=seconds, begin=begin)
        self._unanswered = True
        return self._settle() if wait else None

    def _settle(self) -> Any:
        """Wait for the answer that is due, if one is."""
        if not self._unanswered:
            return None
        self._unanswered = False
        return self._engine.collect()


class Pusher:
    """All pushes of one rank into the engine that it owns; a rank without one takes part in the gathers."""

    def __init__(self, engine: VllmEngine | None, device: torch.device, options: WeightsConfig) -> None:
        """Weights go by CUDA IPC from a GPU, through shared memory from a CPU."""
        self._engine, self._device, self._options = engine, device, options
        self._opened = 0
        self._sender: TrainerWeightTransferEngine[Any] | None = None

    def push(self, source: Source, version: int) -> PushStats | None:
        """See `push`."""
        manifest, on_gpu = manifest_of(source), self._device.type == "cuda"
        capacity = bucket_capacity(manifest, BUCKET_BYTES)
        if on_gpu:  # vLLM sends whole tensors: the largest one has to fit
            capacity = max(capacity, max((spec.num_bytes for spec in manifest), default=0))
        opened, self._opened = self._opened, 0  # after a failed push the engine is prepared again
        receiver = Receiver()
        if self._engine is not None:  # CUDA IPC has one buffer, which is filled again as soon as an update returns
            receiver = EngineReceiver(self._engine, manifest, version, opened=opened, overlap=not on_gpu)
        verify = self._options.verify
        if on_gpu:
            stats = _run(receiver, source, lambda: self._send_ipc(receiver, source, capacity, opened), verify=verify)
        else:
            stats = push(receiver, source, capacity, verify=verify)
        self._opened = capacity
        return stats

    def _send_ipc(self, receiver: Any, source: Any, capacity: int, opened: int) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        from oblr_megatron.rollout.ipc_push import IpcSender

        if self._sender is None or opened != capacity:
            rank = int(self._engine is None)  # rank 0 sends; here every rank that owns an engine sends to its own
            info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=capacity)
            self._sender = IpcSender.trainer_init(info, client=receiver, source=source)
        self._sender.client, self._sender.source = receiver, source
        self._sender.send_weights()
