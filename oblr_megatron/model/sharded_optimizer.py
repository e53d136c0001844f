"""Save and load megatron-core's DistributedOptimizer in the checkpoint format of the plain optimizer.

megatron-core's own formats are unsuitable. One gathers all moments on every rank's host, and misplaces them if a
parameter has a bucket to itself (tied embeddings). The other is bound to the tensor and pipeline sizes. Here each rank
stores its pieces by their position in the whole model, under the plain optimizer's keys. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map

from oblr_megatron.model.shards import pieces, put_back

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from torch import Tensor, nn

State = dict[Any, Any]
PIECES = "pieces"
MASTER = "fp32_param"  # megatron-core's key of the fp32 master in the plain optimizer


def sharded_state(parts: Sequence[DistributedOptimizer], model_state: State) -> State:
    """Masters and moments as views, to save or to load into; moments are created if no step has made them yet.

    The parts are the optimizer of dense weights, and one of experts if there are any.
    """
    if len(parts) == 1:
        return _state_of(parts[0], model_state, "")
    return {index: _state_of(part, model_state, f"chained_{index}.") for index, part in enumerate(parts)}


def load_sharded_state(parts: Sequence[DistributedOptimizer], state: State) -> None:
    """Restore tensors and the step count from a loaded `sharded_state`; rates and decays come from the run's config."""
    for index, part in enumerate(parts):
        own = state if len(parts) == 1 else state[index]
        for number, (_, main, _) in enumerate(_shares(part)):
            for key, tensor in _tensors_of(part, main).items():
                put_back(tensor, own[PIECES][number][key])
        _set_count(part.optimizer, own if "param_groups" in own else own["optimizer"])


def _state_of(part: DistributedOptimizer, model_state: State, prefix: str) -> State:
    """One optimizer's state in the plain optimizer's form, with the tensors under PIECES.

    That form nests the torch optimizer's state under "optimizer" if there are masters.
    """
    part.init_state_fn(part.optimizer, part.config)
    shares = list(_shares(part))
    cuts = get_param_id_to_sharded_param_map(model_state, (parameter for parameter, _, _ in shares))
    own_pieces = {}
    for index, (_, main, span) in enumerate(shares):
        tensors, start = _tensors_of(part, main), f"{prefix}optimizer.state."
        own_pieces[index] = {key: pieces(cuts[index], start + key, tensors[key], span, alone=True) for key in tensors}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": LocalNonpersistentObject([])}
        for group in part.optimizer.param_groups
    ]
    inner: State = {"state": _count(part.optimizer), "param_groups": groups}
    return ({"optimizer": inner} if part.config.bf16 else inner) | {PIECES: own_pieces}


def _shares(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
    """(parameter, updated tensor, slice of the parameter) for each parameter that this rank has a piece of.

    The updated tensor is the piece of the fp32 master, or of the parameter itself if that is fp32.
    """
    groups = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for model_groups, main_groups in groups:
        for parameters, mains in zip(model_groups, main_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                span = part._get_model_param_range_map(parameter)["param"]
                yield parameter, main, slice(span.start, span.end)


def _tensors_of(part: DistributedOptimizer, main: Tensor) -> dict[str, Tensor]:
    """A piece's moments, and the master of a bf16 parameter, by the plain optimizer's keys."""
    tensors = {key: tensor for key, tensor in part.optimizer.state[main].items() if key != "step"}
    return tensors | ({MASTER: main} if part.config.bf16 else {})


def _count(optimizer: torch.optim.Optimizer) -> State:
    """The step count in the plain optimizer's form; empty for a fused optimizer, which counts in its groups."""
    if not isinstance(optimizer, torch.optim.Adam):
        return {}
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return {"common_step": steps[0].clone() if steps else torch.tensor(0.0, dtype=torch.float32)}


def stored_count(stored: State) -> float:
    """The step count of a stored Adam: torch's counts by parameter, a fused one in its groups."""
    groups = [group["step"] for group in stored["param_groups"] if "step" in group]
    return float(stored["state"].get("common_step", groups[0] if groups else 0))


def _set_count(optimizer: torch.optim.Optimizer, stored: State) -> None:
    """Restore the step count, whichever implementation wrote it."""
    count = stored_count(stored)
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(count, dtype=torch.float32)
    else:
        for group in optimizer.param_groups:
            group["step"] = int(count)
