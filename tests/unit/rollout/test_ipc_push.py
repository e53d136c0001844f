"""A push over CUDA IPC to an engine that has failed: nothing is exported, and the ranks stay in step.

vLLM's sender is real, its GPU is not. Not covered: CUDA, several ranks. tests/sim_cuda/test_push.py has a push that
arrives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.weight_transfer import packed_tensor

from oblr_megatron.rollout.ipc_push import IpcSender
from oblr_megatron.rollout.push import Receiver

CAPACITY = 64


def push(sizes: list[int], error: Exception | None) -> tuple[int, list[str]]:
    """Send tensors of so many bytes; returns the number of exports, and the steps in their order."""
    exports, steps = list[torch.Tensor](), list[str]()

    class Sender(IpcSender):
        def _all_gather_and_merge_handles(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
            assert len(handles) == 1
            steps.append("gather")
            return handles

        @staticmethod
        def _post_send_sync() -> None:
            steps.append("sync")

    class Tensors:
        def __iter__(self) -> Any:
            for number, size in enumerate(sizes):
                steps.append(f"tensor {number}")
                yield str(number), torch.zeros(size // 4) if size % 4 == 0 else torch.zeros(size, dtype=torch.uint8)

    def empty(*size: Any, device: str, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def export(tensor: torch.Tensor) -> tuple[None, None]:
        exports.append(tensor)
        return None, None

    sender: Any = object.__new__(Sender)
    receiver: Any = Receiver()
    receiver.error, receiver.update_weights = error, lambda _: None
    vars(sender).update(client=receiver, is_sender=True, gpu_uuid="a", packed_buffer_size_bytes=CAPACITY)
    with pytest.MonkeyPatch.context() as patch:
        stream = SimpleNamespace(synchronize=lambda: None)
        torch_of_a_cpu = SimpleNamespace(
            empty=empty, cuda=SimpleNamespace(current_stream=lambda: stream), uint8=torch.uint8
        )
        patch.setattr(packed_tensor, "torch", torch_of_a_cpu)
        patch.setattr(packed_tensor, "reduce_tensor", export)
        sender._send_packed(Tensors())
    return len(exports), steps


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, CAPACITY), max_size=12))
def test_a_failed_engine_gets_no_export_and_its_rank_stays_in_step_with_the_others(sizes: list[int]) -> None:
    exports, steps = push(sizes, None)
    assert exports == 1
    assert push(sizes, RuntimeError("lost")) == (0, steps)
