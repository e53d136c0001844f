"""A LoRA adapter as a directory in PEFT's format: adapter_config.json and adapter_model.safetensors.

    write_adapter(stream, metas, target, AdapterShape(16, ("q_proj", "v_proj")), alpha=32, base="Qwen/Qwen3-8B")
    adapter = check_adapter_dir(target, check_hf_dir(base))
    merge_adapter(adapter, merged_dir)                        # a whole Hugging Face directory

PEFT and vLLM load it; the names of its tensors are in `weights.adapter`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from oblr_megatron.checkpoint.hf_dir import HFDir, read_json
from oblr_megatron.checkpoint.hf_write import MAX_SHARD_BYTES, whole_directory, write_description, write_weights
from oblr_megatron.checkpoint.safetensors_header import DTYPE_BYTES, read_header
from oblr_megatron.checkpoint.safetensors_io import TensorReader, num_bytes, open_tensors, write_file
from oblr_megatron.checkpoint.store import check_absent, check_space, sync
from oblr_megatron.errors import UserError
from oblr_megatron.families import MATRICES
from oblr_megatron.weights.adapter import PREFIX, A, AdapterShape, B, adapter_shapes
from oblr_megatron.weights.export import TensorMeta
from oblr_megatron.weights.names import ModelShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
NEUTRAL: dict[str, Any] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),  # others change the base
}
"""Settings of an adapter, and the values with which it is plain LoRA."""


@dataclass(frozen=True, slots=True)
class AdapterDir:
    """A directory that passed `check_adapter_dir`."""

    path: Path
    base: HFDir
    shape: AdapterShape
    scale: float  # alpha / rank, or alpha / sqrt(rank)
    tensors: HFDir  # the file of A and B


def write_adapter(
    stream: Iterator[tuple[str, Tensor]],
    metas: Sequence[TensorMeta],
    target: Path,
    adapter: AdapterShape,
    *,
    alpha: float,
    base: str,
    replaces: bool = False,
) -> None:
    """Write an adapter; nothing is left if that fails.

    Args:
        stream: A and B of each matrix under PEFT's names, in the order of `metas`; B is not multiplied by alpha / rank.
        metas: names, shapes and dtypes to write.
        target: must not exist, unless `replaces`.
        adapter: rank and adapted matrices.
        alpha: the delta is alpha / rank B A.
        base: name or directory of the base model.
        replaces: whether an older target is replaced.

    Raises:
        NoSpaceError, RunError: writing failed.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapter.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
    }
    with whole_directory(target, replaces=replaces) as partial:
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        sync(partial / CONFIG)
        write_file(partial / TENSORS, metas, stream)


def check_adapter_dir(path: Path, base: HFDir) -> AdapterDir:
    """Check that a directory holds a plain LoRA adapter of this model, from its headers.

    Raises:
        UserError: a file is missing or damaged, a setting is not supported, or a tensor does not fit the model.
    """
    config = read_json(path / CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or config.get("peft_type") != "LORA":
        what = f"peft_type {config.get('peft_type')!r}, r {rank!r} and lora_alpha {alpha!r} are not those of LoRA"
        raise UserError(what, where=str(path / CONFIG), fix="give an adapter of PEFT's LoraConfig")
    for name, values in NEUTRAL.items():
        if config.get(name, values[0]) not in values:
            what = f"{name} {config[name]!r:.60} is not supported"
            raise UserError(what, where=str(path / CONFIG), fix="merge it with PEFT (merge_and_unload)")
    file = path / TENSORS
    if not file.is_file():
        raise UserError(f"{TENSORS} is missing", where=str(path), fix="complete the directory, or save it again")
    _, entries = read_header(file)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    targets = {name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in shapes}
    shape = AdapterShape(rank, tuple(target for target in MATRICES if target in targets))
    expected = adapter_shapes(ModelShape.of(base.config), shape)
    for name, size in shapes.items():
        partner = name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A
        if size != expected.get(name) or partner not in shapes or entries[name]["dtype"] not in DTYPE_BYTES:
            due = expected.get(name)
            what = f"{name} {entries[name]['dtype']}{list(size)} does not belong to an adapter of {base.path}" + (
                f": {list(due)} is due, and {partner}" if due else ""
            )
            raise UserError(what, where=str(file), fix="give the base model that the adapter was trained on")
    if not shapes:
        raise UserError("the file has no tensors", where=str(file), fix="save the adapter again")
    scale = cast("float", alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    dtypes = {name: entry["dtype"] for name, entry in entries.items()}
    held = HFDir(path, config, (TENSORS,), shapes, tied=False, num_bytes=file.stat().st_size, dtypes=dtypes)
    return AdapterDir(path, base, shape, scale, held)


class MergedTensors(TensorReader):
    """The base's tensors with W + scale B A in place of each adapted W: summed in fp32, rounded to the dtype of W."""

    def __init__(self, base: TensorReader, adapter: TensorReader, scale: float) -> None:
        self.metas, self._base, self._adapter, self._scale = base.metas, base, adapter, scale

    def __getitem__(self, name: str) -> Tensor:
        weight, module = self._base[name], PREFIX + name.removesuffix(".weight")
        if module + A not in self._adapter.metas:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        a, b = self._adapter[module + A].to(wide), self._adapter[module + B].to(wide)
        return weight.to(wide).addmm_(b, a, alpha=self._scale).to(weight.dtype)


@contextmanager
def open_merged(adapter: AdapterDir) -> Iterator[MergedTensors]:
    """A reader of the merged weights; the files are open inside the block."""
    with open_tensors(adapter.base) as base, open_tensors(adapter.tensors) as delta:
        yield MergedTensors(base, delta, adapter.scale)


def merge_adapter(
    adapter: AdapterDir, target: Path, dtype: torch.dtype | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Write the merged model as a Hugging Face directory; returns the bytes of its tensors.

    Raises:
        UserError: the target exists.
        NoSpaceError, RunError: writing failed.
    """
    check_absent(target)
    base = adapter.base
    with open_merged(adapter) as tensors:
        metas = [TensorMeta(name, dtype or tensors.metas[name].dtype, size) for name, size in base.shapes.items()]
        check_space(target.parent, sum(map(num_bytes, metas)))
        with whole_directory(target) as partial:
            write_description(base.config, base.copied, partial, dtype)
            return write_weights(((meta.name, tensors[meta.name]) for meta in metas), metas, partial, max_shard_bytes)
