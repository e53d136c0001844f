"""Hugging Face's tensors in a vLLM model, as views of the parameters that the engine computes with. Imports no vllm.

vLLM fuses q, k, v into one parameter, gate and up into another, and a layer's experts into two. It pads the vocabulary.
A worker of a tensor-parallel engine holds its share of the rows or columns. A layer with a LoRA slot holds its own
layer as `base_layer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from oblr_megatron.errors import WeightError

EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""vLLM's parameters of fused experts, [experts, rows, columns], and the tensors in each of them."""
BASE_LAYER = ".base_layer"


def engine_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Hugging Face name -> this worker's part of the tensor, in its memory. The model is vLLM's.

    Raises:
        WeightError: vLLM keeps a parameter in a layout of its own, in which the tensors cannot be found.
    """
    modules = dict(model.named_modules())
    tensors: dict[str, Tensor] = {}
    for path, parameter in model.named_parameters():  # a tied parameter is listed once, as the embedding
        prefix, _, name = path.rpartition(".")
        named = prefix.removesuffix(BASE_LAYER)
        tensors |= dict(_unfused(named, modules[prefix], name, parameter.detach(), model))
    return tensors


def unwritten(model: Any, pushed: Collection[str]) -> list[str]:
    """Weights and biases of vLLM's model that no tensor of a push reaches, by vLLM's names.

    A parameter that is made from a weight, such as a scale, counts as that weight. It may share memory with another.
    """
    sources, memory = {}, {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        module, _, name = path.rpartition(".")
        prefix = module.removesuffix(BASE_LAYER)
        parent, _, leaf = prefix.rpartition(".")
        fused = next((parts for key, parts in EXPERTS.items() if name.startswith(key)), None)
        if fused is not None:
            experts = range(model.get_submodule(module).global_num_experts)
            sources[path] = [f"{parent}.{expert}.{part}.weight" for expert in experts for part in fused]
        elif name == "bias" or name.startswith("weight"):
            parts = [f"{parent}.{part}" for part in model.packed_modules_mapping.get(leaf, ())] or [prefix]
            sources[path] = [f"{part}.{'bias' if name == 'bias' else 'weight'}" for part in parts]
        memory[path] = parameter.data_ptr()
    written = {memory[path] for path, names in sources.items() if all(name in pushed for name in names)}
    return [path for path in sources if memory[path] not in written]


def _unfused(prefix: str, module: nn.Module, name: str, parameter: Tensor, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in one parameter of a module."""
    parent, _, leaf = prefix.rpartition(".")
    fused = model.packed_modules_mapping.get(leaf)
    vocabulary: Any = getattr(module, "shard_indices", None)
    if name in EXPERTS:
        yield from _of_experts(parent, module, name, parameter)
        return
    if name not in ("weight", "bias"):
        raise WeightError(f"vLLM keeps {prefix}.{name} in a layout of its own, in which no tensor can be found")
    if fused is not None:
        sizes: Any = module.output_partition_sizes
        yield from ((f"{parent}.{part}.{name}", rows) for part, rows in zip(fused, parameter.split(sizes), strict=True))
    elif vocabulary is not None:
        yield f"{prefix}.{name}", parameter[: vocabulary.num_org_elements]
    else:
        yield f"{prefix}.{name}", parameter


def _of_experts(prefix: str, module: Any, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each expert's tensors in a parameter that keeps the layout it was loaded in, with all experts."""
    parts, ffn = EXPERTS[name], module.intermediate_size_per_partition
    plain = (len(parts) * ffn, module.hidden_size) if len(parts) > 1 else (module.hidden_size, ffn)
    if tuple(parameter.shape) != (module.global_num_experts, *plain):
        raise WeightError(f"vLLM keeps {prefix}.{name} as {list(parameter.shape)}, in which no tensor can be found")
    for expert, rows in enumerate(parameter):
        tensors = zip(parts, rows.chunk(len(parts)), strict=True)
        yield from ((f"{prefix}.{expert}.{part}.weight", tensor) for part, tensor in tensors)
