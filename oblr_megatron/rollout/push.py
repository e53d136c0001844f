"""One push, as every rank of the trainer runs it: gather in lockstep, and feed an engine where the rank owns one."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from oblr_megatron.config.rollout import WeightsConfig
from oblr_megatron.engine.protocol import PushStats
from oblr_megatron.errors import RunError, WeightError
from oblr_megatron.weights.manifest import Manifest, Source, manifest_of
from oblr_megatron.weights.names import ModelShape
from oblr_megatron.weights.shm import bucket_capacity
from oblr_megatron.weights.verify import Digests, expected_digests, first_difference

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    from oblr_megatron.engine.handle import VllmEngine

FEEDING, LOOKING_ON = 0, 1
"""vLLM's trainer engines take a rank, and rank 0 speaks to its engine; here every owner does, each to its own."""


class Pusher:
    """Sends sources to one engine, or, on a rank without one, takes part in gathering them."""

    def __init__(self, engine: VllmEngine | None, device: torch.device, options: WeightsConfig | None = None) -> None:
        """Args:
        engine: the one this rank owns.
        device: of the trainer; a GPU's weights go by CUDA IPC, a CPU's through shared memory.
        options: size of a bucket, and what is checked.
        """
        self._engine, self._device, self._options = engine, device, options or WeightsConfig()
        self._bucket_bytes = self._options.bucket_mib * 2**20
        # CUDA IPC hands out the one buffer that it fills again as soon as an update returns.
        self._client = LockstepClient(engine, overlap=device.type != "cuda")
        self._manifest: Manifest = ()
        self._sender: TrainerWeightTransferEngine[Any] | None = None

    def push(self, source: Source, version: int) -> PushStats:
        """Send all tensors. The source is iterated to its end whatever happens to the engine.

        Args:
            source: collective over the ranks that share its tensors.
            version: of the weights.

        Raises:
            RunError: this rank's engine did not take them, and will refuse to generate.
        """
        manifest = manifest_of(source)
        begin = self._client.begin(manifest, version)
        sender, self._sender = self._sender, None  # back in place when all went well; else made anew next time
        try:
            if sender is None or manifest != self._manifest:
                sender = self._make_sender(source, manifest)
            sender.source = source  # type: ignore[assignment]  # vLLM names its base class, and uses no more
            sender.send_weights()
            if self._options.verify:
                self._verify(source)
        except BaseException as error:
            self._client.abort(f"the trainer broke off: {error!r}")
            raise
        self._client.finish()
        self._sender, self._manifest = sender, manifest
        return PushStats(
            bytes=sum(spec.num_bytes for spec in manifest),
            seconds=time.monotonic() - begin,
            tensors=len(manifest),
            buckets=self._client.buckets,
        )

    def _verify(self, source: Source) -> None:
        """Gather once more, on all ranks, and compare with what this rank's engine, if it owns one, now holds."""
        if self._engine is None:
            for _ in source:
                pass
            return
        config = json.loads((self._engine.spec.model / "config.json").read_text(encoding="utf-8"))
        workers = self._engine.spec.tensor_parallel_size
        self._client.compare(expected_digests(source, ModelShape.of(config), workers))

    def _make_sender(self, source: Any, manifest: Manifest) -> TrainerWeightTransferEngine[Any]:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from oblr_megatron.engine.plugin import register_transfer_engines

        register_transfer_engines()
        return WeightTransferTrainerFactory.trainer_init(self._init_info(manifest), client=self._client, source=source)

    def _init_info(self, manifest: Manifest) -> TrainerInitInfo:
        from oblr_megatron.engine.transfer import IpcTrainerInitInfo, ShmTrainerInitInfo

        rank = LOOKING_ON if self._engine is None else FEEDING
        if self._device.type == "cuda":  # vLLM's engine sends whole tensors: its buffer has room for the largest
            largest = max((spec.num_bytes for spec in manifest), default=0)
            capacity = max(bucket_capacity(manifest, self._bucket_bytes), largest)
            return IpcTrainerInitInfo(rank=rank, packed_buffer_size_bytes=capacity)
        return ShmTrainerInitInfo(
            rank=rank,
            buffer=None if self._engine is None else self._engine.buffer,
            bucket_bytes=self._bucket_bytes,
            checksum=self._options.checksum,
        )


class LockstepClient:
    """vLLM's `VLLMWeightSyncClient` for one engine process, which does not raise during a push.

    A rank that broke out of a push would leave the others in the middle of a gather. So the first failure is kept, what
    comes after it is not sent, and `finish` raises it.
    """

    def __init__(self, engine: VllmEngine | None, *, overlap: bool) -> None:
        """Args:
        engine: None on a rank that owns no engine, and never calls.
        overlap: await an update's answer only when the next message is sent, so that the engine loads one bucket
            while the trainer gathers the next.
        """
        self._engine, self._overlap = engine, overlap
        self._manifest: Manifest = ()
        self._version = 0
        self._begin = 0.0
        self._error: RunError | None = None
        self._unanswered = False
        self.buckets = 0

    def begin(self, manifest: Manifest, version: int) -> float:
        """Say what the next push is; the engine hears of it with the first bucket. Returns when the push began.

        The clock starts when the engine is there: its start has a deadline of its own.
        """
        self._manifest, self._version = manifest, version
        self._error, self.buckets = None, 0
        if self._engine is not None:
            try:
                self._engine.wait_ready()
            except RunError as error:
                self._error = error
        self._begin = time.monotonic()
        return self._begin

    def compare(self, expected: list[Digests]) -> None:
        """Read the engine's weights back, unless the push has failed already."""
        if self._error is not None:
            return
        try:
            self._settle()
            self._post("read_back", {}, time.monotonic())
            different = first_difference(expected, self._settle())
            if different is not None:
                raise WeightError(f"{different} is not in {self._engine_name} what was pushed as {self._version}")
        except RunError as error:
            self._error = error

    def abort(self, reason: str) -> None:
        """Have the engine refuse to generate until a later push succeeds."""
        with suppress(RunError):  # what it says is known: it is why the push is given up
            self._settle()
        if self._engine is not None and not self._engine.lost:
            with suppress(RunError):  # it died since, and a dead engine generates nothing anyway
                self._post("abort_push", {"reason": f"push {self._version} failed: {reason}"}, time.monotonic())
                self._settle()

    def finish(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            self.abort(str(self._error))
            raise self._error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Part of vLLM's protocol."""
        self._try("init_transfer", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Part of vLLM's protocol."""
        self._try("start_push", {"manifest": self._manifest, "version": self._version})

    def update_weights(self, update_info: Any) -> None:
        """Part of vLLM's protocol; with overlap the engine may not be done with this update, but is with the last."""
        self.buckets += 1
        self._try("update_weights", {"update_info": update_info}, wait=not self._overlap)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Part of vLLM's protocol."""
        self._try("finish_push", {"version": self._version})

    def _try(self, method: str, arguments: dict[str, Any], *, wait: bool = True) -> None:
        if self._error is not None:
            return
        try:
            self._settle()
            self._post(method, arguments, self._begin)
            if wait:
                self._settle()
        except RunError as error:
            self._error = error

    def _post(self, method: str, arguments: dict[str, Any], begin: float) -> None:
        assert self._engine is not None, "a rank without an engine sends nothing"
        what = f"push {self._version} into {self._engine_name}"
        self._engine.post(method, arguments, what=what, seconds=self._engine.deadlines.push, begin=begin)
        self._unanswered = True

    def _settle(self) -> Any:
        """Wait for the answer that is still owed, if one is."""
        if not self._unanswered or self._engine is None:
            return None
        self._unanswered = False
        return self._engine.collect()

    @property
    def _engine_name(self) -> str:
        return "no engine" if self._engine is None else self._engine.spec.name
