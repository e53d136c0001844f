"""Saves and loads policy and optimizer as a torch_dist checkpoint of megatron-core; any layout can load it.

    writer = TorchDistWriter(group, policy.parallel)
    write = writer.stage(training_state(policy, optimizer), directory)    # collective; the state may change afterwards
    write()                                                               # collective; may run in a thread

    load_training_state(policy, optimizer, directory)      # collective, under any TP, PP, EP, VPP and DP
    load_weights(policy, directory)                        # only weights, without fp32 masters

megatron-core's asynchronous save is not used: it forks the trainer and keeps a manager process. Its children hold the
sockets of a killed rank, so other ranks wait for a dead peer, and the manager outlives the trainer. Here the state is
copied to host memory, and a thread writes it with torch.distributed.checkpoint over a separate process group.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException

from oblr_megatron.checkpoint.save_planner import LinearPlanner, alone
from oblr_megatron.checkpoint.torch_files import BACKEND, VERSION, TensorFiles, plain_files, save_common
from oblr_megatron.errors import RunError
from oblr_megatron.model.momentum import GradientMomentum
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy

RANDOM = "random_state"
EXTRA_STATE = "_extra_state"  # in the names of state that modules save besides parameters
State = dict[str, Any]
"""megatron-core's nested sharded state dict, with a ShardedTensor for each tensor."""


def model_state(policy: Policy) -> State:
    """The trained weights, keyed by their names in a GPTModel, each placed within the whole model.

    Transformer Engine's extra state is left out, so that checkpoints do not depend on the layer implementation.
    """
    states = {}
    for index, chunk in enumerate(policy.chunks):
        frozen = _frozen(chunk.module)
        states[f"model{index}"] = {
            name: value
            for name, value in chunk.module.sharded_state_dict().items()
            if EXTRA_STATE not in name and name not in frozen
        }
    return states


def training_state(policy: Policy, optimizer: PolicyOptimizer, momentum: GradientMomentum | None = None) -> State:
    """Weights, fp32 masters, moments, the average gradient if one is kept, and every rank's random states.

    Used for saving and as the target of loading.
    """
    model = model_state(policy)
    state = model | {"optimizer": optimizer.sharded_state_dict(model)}
    if momentum is not None:
        state["momentum"] = momentum.sharded_state_dict(model)
    parallel = policy.parallel  # the key contains the number of ranks
    random_states = ShardedObject(RANDOM, _random_states(), (parallel.world_size,), (parallel.rank,))
    return state | {"random": random_states}


def load_weights(policy: Policy, directory: Path) -> None:
    """Load the weights; collective. fp32 masters of an existing optimizer are not updated.

    Raises:
        RunError: the checkpoint does not hold this model's weights.
    """
    _set_weights(policy, _load(model_state(policy), directory))


def load_training_state(
    policy: Policy, optimizer: PolicyOptimizer, directory: Path, momentum: GradientMomentum | None = None
) -> None:
    """Load weights, masters, moments and the average gradient if one is kept; collective.

    Random states are loaded only if the number of ranks is unchanged.

    Raises:
        RunError: the checkpoint does not hold what this model and optimizer need.
    """
    state = training_state(policy, optimizer, momentum)
    same_ranks = state["random"].unique_key in load_sharded_metadata(str(directory))
    if not same_ranks:
        del state["random"]
    loaded = _load(state, directory)
    _set_weights(policy, loaded)
    optimizer.load_state_dict(loaded["optimizer"])
    if momentum is not None:
        momentum.load_state_dict(loaded["momentum"])
    if same_ranks:
        _set_random_states(loaded["random"])


class TorchDistWriter:
    """Writes checkpoints; the distribution of tensors over ranks is planned once.

    Args:
        group: CPU group of all ranks, used for nothing else while a checkpoint is written.
        parallel: the layout.
    """

    def __init__(self, group: dist.ProcessGroup, parallel: Parallel) -> None:
        self._rank, self._group = parallel.rank, group
        # Replicas hold equal weights; each writes a share of them. No strategy of megatron-core writes here.
        unused = TorchDistSaveShardedStrategy(BACKEND, VERSION)
        self._shares = FullyParallelSaveStrategyWrapper(unused, parallel.dp_cp_group, do_cache_distribution=True)
        self._validated = False

    def stage(self, state: State, directory: Path, *, copy: bool = True) -> Callable[[], None]:
        """Copy the tensors that this rank will write; collective.

        Args:
            state: see `training_state`.
            directory: exists, is empty, and is visible to every rank.
            copy: whether to copy tensors that are already on the CPU, because they may change before the write.

        Returns:
            A function that writes the checkpoint. It is collective, may run in any thread, and raises RunError if a
            rank cannot write.
        """
        sharded, common = save_preprocess(state, not self._validated)
        self._validated = True
        self._shares.apply_saving_parallelization(sharded)
        for shard in nested_values(sharded):
            if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
                shard.data = shard.data.detach().to("cpu", copy=copy)
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        return partial(self._write, keyed, deepcopy(common), directory)

    def _write(self, keyed: State, common: State, directory: Path) -> None:
        failure: list[str | None] = [None]
        try:
            if self._rank == 0:
                save_common(common, directory)
        except OSError as error:
            failure = [_reason(error)]
        dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0] is not None:
            raise RunError(f"rank 0 cannot write the checkpoint: {failure[0]}")
        apart = {
            key: [alone(part) if isinstance(part, ShardedTensor) else part for part in parts]
            for key, parts in keyed.items()
        }
        tensors, files = mcore_to_pyt_state_dict(apart), TensorFiles(directory)
        try:
            with plain_files():
                dcp.save(tensors, storage_writer=files, planner=LinearPlanner(), process_group=self._group)
        except CheckpointException as error:  # names every rank that failed, on every rank
            raise RunError(f"rank {min(error.failures)} cannot write the checkpoint: {_reason(error)}") from None


def _load(state: State, directory: Path) -> State:
    try:
        with warnings.catch_warnings():
            # megatron-core calls deprecated functions of torch, and one with its arguments in an earlier order
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
            return dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, CheckpointException) as error:
        reason = _reason(error)
        raise RunError(f"cannot load the checkpoint {directory} into this model and optimizer: {reason}") from error


def _set_weights(policy: Policy, loaded: State) -> None:
    for index, chunk in enumerate(policy.chunks):
        keys = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
        absent = {name for name in keys.missing_keys if EXTRA_STATE not in name} - _frozen(chunk.module)
        wrong = [*sorted(absent), *keys.unexpected_keys]
        assert not wrong, f"the model and the loaded state differ in {wrong}"


def _frozen(module: Any) -> set[str]:
    """Names of the parameters that no step changes."""
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def _random_states() -> State:
    """Random states of Python, numpy and torch on the CPU.

    No step uses them today: samples and folds have their own seeds, and dropout is off. A library may.
    """
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }


def _set_random_states(state: State) -> None:
    """Restore what `_random_states` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def _reason(error: BaseException) -> str:
    """First line of an error; of several ranks' errors, the lowest rank's."""
    if isinstance(error, CheckpointException):
        return _reason(error.failures[min(error.failures)][0])
    return (str(error).splitlines() or [type(error).__name__])[0]
