"""The policy's LoRA adapter in vLLM's only slot, inside a worker of an engine. Imports no vllm at load.

    stage(model, manifest)      # memory for the tensors of a push; the transfer engine fills it
    install(model)              # into the slot, in place of the old adapter

All sampled requests name the adapter `SLOT`. Its id never changes, so the engine drops cached prefixes with each push.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from oblr_megatron.errors import WeightError
from oblr_megatron.weights.adapter import PREFIX, A, AdapterShape, B
from oblr_megatron.weights.manifest import Manifest

SLOT = 1
"""vLLM's number of the adapter."""


class Stage:
    """The tensors of an adapter's push until all have come. It has the method by which vLLM's transports load."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.tensors = {spec.name: torch.empty(spec.shape, dtype=spec.torch_dtype, device=device) for spec in manifest}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors."""
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)


def slot_options(adapter: AdapterShape) -> dict[str, Any]:
    """vLLM's options for one slot. Its ranks are few, and a slot of a higher rank is padded with zeros."""
    from vllm.config.lora import MaxLoRARanks

    rank = min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank)
    targets = list(adapter.targets)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": targets}


def lora_request(path: Path | None = None) -> Any:
    """vLLM's name of the adapter in a request; with a path vLLM loads that directory, in PEFT's format."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", SLOT, str(path or "pushed"))


def stage(model: Any, manifest: Manifest | None) -> None:
    """Prepare for a push of an adapter; None: for one of the model's own weights."""
    manager = model.lora_manager
    manager.stage = None if manifest is None else Stage(manifest, manager.device)


def staged(model: Any) -> Stage | None:
    """The stage of the open push; None if it is one of the model's own weights."""
    return getattr(getattr(model, "lora_manager", None), "stage", None)


def install(model: Any) -> None:
    """Replace the adapter by the staged one.

    Raises:
        WeightError: vLLM has no slot at a matrix of the adapter.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager, tensors = model.lora_manager, staged(model).tensors  # type: ignore[union-attr]
    reached = {part for _, _, part in slots(model)}
    lost = [name for name in tensors if name.removeprefix(PREFIX).removesuffix(A).removesuffix(B) not in reached]
    if lost:
        raise WeightError(f"vLLM has no LoRA slot for {len(lost)} tensors of the adapter, e.g. {lost[0]}")
    rank = next(len(tensor) for name, tensor in tensors.items() if name.endswith(A))
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])  # the trainer has multiplied B by alpha / rank
    dtype = manager.lora_config.lora_dtype
    adapter = LoRAModel.from_lora_tensors(SLOT, tensors, helper, device=str(manager.device), dtype=dtype)
    manager.remove_adapter(SLOT)
    manager.add_adapter(adapter)
    manager.activate_adapter(SLOT)
    manager.stage = None


def slots(model: Any) -> Iterator[tuple[Any, int, str]]:
    """Each layer with a slot, the index of a matrix in it, and the name of that matrix's module."""
    manager = model.lora_manager
    for path, layer in manager.modules.items():
        for index, part in enumerate(manager.packed_modules.get(path, [path])):
            yield layer, index, part


def read_adapter(model: Any, names: frozenset[str]) -> dict[str, str]:
    """Digests of the named tensors in a worker's slot; see `weights.verify`."""
    from oblr_megatron.weights.verify import digest

    rank = model.lora_manager.get_adapter(SLOT).rank
    digests = {}
    for layer, index, part in slots(model):
        for name, tensor in (
            (PREFIX + part + A, layer.lora_a_stacked[index][0, 0, :rank]),
            (PREFIX + part + B, layer.lora_b_stacked[index][0, 0, :, :rank]),
        ):
            if name in names:
                digests[name] = digest(tensor)
    return digests
