"""The state of megatron-core's DistributedOptimizer, for checkpoints that the plain optimizer reads, and the other way.

megatron-core has formats of its own for it: one gathers all moments on every rank's host and misplaces them where a
parameter has a bucket to itself (tied embeddings), the other is bound to the tensor and pipeline sizes. Here each rank
stores its stretches by their place in the whole model, under the keys of the plain optimizer. Nothing is gathered.
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
MASTER = "fp32_param"  # megatron-core's name of it in the plain optimizer's keys


def sharded_state(parts: Sequence[DistributedOptimizer], model_state: State) -> State:
    """Masters and moments as views, to be saved or to be read into; moments that no step has made yet are made.

    Args:
        parts: the optimizer of dense weights, and that of experts if there are any.
        model_state: the policy's sharded state dict.
    """
    if len(parts) == 1:
        return _state_of(parts[0], model_state, "")
    return {index: _state_of(part, model_state, f"chained_{index}.") for index, part in enumerate(parts)}


def load_sharded_state(parts: Sequence[DistributedOptimizer], state: State) -> None:
    """Take over what a checkpoint was loaded into: tensors and the count of steps. Rates and decays are a run's own."""
    for index, part in enumerate(parts):
        own = state if len(parts) == 1 else state[index]
        for number, (_, main, _) in enumerate(_shares(part)):
            for key, tensor in _tensors_of(part, main).items():
                put_back(tensor, own[PIECES][number][key])
        _set_count(part.optimizer, own if "param_groups" in own else own["optimizer"])


def _state_of(part: DistributedOptimizer, model_state: State, prefix: str) -> State:
    """One optimizer's, in the plain optimizer's form but for the tensors, which a checkpoint knows by their keys.

    That form has the torch optimizer's state under "optimizer" where there are masters beside it.
    """
    part.init_state_fn(part.optimizer, part.config)
    shares = list(_shares(part))
    cuts = get_param_id_to_sharded_param_map(model_state, (parameter for parameter, _, _ in shares))
    found = {}
    for index, (_, main, span) in enumerate(shares):
        tensors, start = _tensors_of(part, main), f"{prefix}optimizer.state."
        found[index] = {key: pieces(cuts[index], start + key, tensors[key], span, alone=True) for key in tensors}
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": LocalNonpersistentObject([])}
        for group in part.optimizer.param_groups
    ]
    inner: State = {"state": _count(part.optimizer), "param_groups": groups}
    return ({"optimizer": inner} if part.config.bf16 else inner) | {PIECES: found}


def _shares(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
    """Each parameter that this rank has a stretch of: what is updated (of the master, or of itself in fp32), where."""
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
    """A stretch's moments and, where it is one, the master, by the name that the plain optimizer has for each."""
    tensors = {key: tensor for key, tensor in part.optimizer.state[main].items() if key != "step"}
    return tensors | ({MASTER: main} if part.config.bf16 else {})


def _count(optimizer: torch.optim.Optimizer) -> State:
    """Steps so far, as the plain optimizer stores them; a fused one counts in its groups instead."""
    if not isinstance(optimizer, torch.optim.Adam):
        return {}
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return {"common_step": steps[0].clone() if steps else torch.tensor(0.0, dtype=torch.float32)}


def _set_count(optimizer: torch.optim.Optimizer, stored: State) -> None:
    """Take up the count, whichever implementation wrote it."""
    groups = [group["step"] for group in stored["param_groups"] if "step" in group]
    count = stored["state"].get("common_step", groups[0] if groups else 0)
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(count), dtype=torch.float32)
    else:
        for group in optimizer.param_groups:
            group["step"] = int(count)
