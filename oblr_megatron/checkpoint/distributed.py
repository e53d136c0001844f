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
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from oblr_megatron.checkpoint.torch_files import BACKEND, VERSION, TensorFiles, plain_files, save_common
from oblr_megatron.errors import RunError

if TYPE_CHECKING:
    from oblr_megatron.model.momentum import GradientMomentum
    from oblr_megatron.model.optimizer import PolicyOptimizer
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.policy import Policy

RANDOM = "random_state"
EXTRA_STATE = "_extra_state"  # in the names of state that modules save besides parameters
State = dict[str, Any]
"""megatron-core's nested sharded state dict, with a ShardedTensor for each tensor."""


def model_state(policy: Policy) -> State:
    """The weights, keyed by their names in a GPTModel, each placed within the whole model.

    Transformer Engine's extra state (the scale history of delayed FP8) is left out, so that checkpoints do not depend
    on the layer implementation. A resumed run in delayed FP8 starts a new history.
    """
    states = [chunk.module.sharded_state_dict() for chunk in policy.chunks]
    return {
        f"model{index}": {name: value for name, value in state.items() if EXTRA_STATE not in name}
        for index, state in enumerate(states)
    }


def training_state(policy: Policy, optimizer: PolicyOptimizer, momentum: GradientMomentum | None = None) -> State:
    """Weights, fp32 masters, moments, the average gradient if one is kept, and every rank's random states.

    Used for saving and as the target of loading.
    """
    model = model_state(policy)
    state = model | {"optimizer": optimizer.sharded_state_dict(model)}
    if momentum is not None:
        state["momentum"] = momentum.sharded_state_dict(model)
    return state | _random_state(policy.parallel)


def load_weights(policy: Policy, directory: Path) -> None:
    """Load the weights; collective. fp32 masters of an existing optimizer are not updated.

    Raises:
        RunError: the checkpoint does not hold this model's weights.
    """
    state = model_state(policy)
    _set_weights(policy, _load(state, directory))


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
        _set_random_state(loaded["random"])


class TorchDistWriter:
    """Writes checkpoints; the distribution of tensors over ranks is planned once.

    Args:
        group: CPU group of all ranks, used for nothing else while a checkpoint is written.
        parallel: the layout.
    """

    def __init__(self, group: dist.ProcessGroup, parallel: Parallel) -> None:
        self._rank, self._group = parallel.rank, group
        # Replicas hold equal weights; each writes a share of them.
        self._strategy = FullyParallelSaveStrategyWrapper(
            _ThreadStrategy(self._group), parallel.dp_cp_group, do_cache_distribution=True
        )
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
        self._strategy.base_strategy.copy = copy
        sharded, common = save_preprocess(state, not self._validated)
        self._validated = True
        # Not its async_save: from 0.17 on megatron-core passes an argument there that earlier versions do not have.
        self._strategy.apply_saving_parallelization(sharded)
        request = self._strategy.base_strategy.async_save(sharded, directory)
        return partial(self._write, request, deepcopy(common), directory)

    def _write(self, request: AsyncRequest, common: State, directory: Path) -> None:
        failure = None
        try:
            if self._rank == 0:
                save_common(common, directory)
        except OSError as error:
            failure = _reason(error)
        failures: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, failure, group=self._group)
        _raise_first(dict(enumerate(failures)))
        assert request.async_fn is not None
        try:
            request.async_fn()
        except CheckpointException as error:  # names every rank that failed, on every rank
            _raise_first({rank: _reason(cause) for rank, (cause, _) in error.failures.items()})


class _ThreadStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format, written by torch.distributed.checkpoint without extra processes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(BACKEND, VERSION)
        self.copy = True
        self._group = group

    def async_save(self, sharded_state_dict: State, checkpoint_dir: Path) -> AsyncRequest:
        """Copy the tensors that this rank writes; the returned request writes them."""
        for shard in nested_values(sharded_state_dict):
            if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
                shard.data = shard.data.detach().to("cpu", copy=self.copy)
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        return AsyncRequest(partial(self._save, keyed, checkpoint_dir), (), [])

    def _save(self, keyed: State, directory: Path) -> None:
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        state = mcore_to_pyt_state_dict(keyed, False)
        with plain_files():
            dcp.save(state, storage_writer=TensorFiles(directory), planner=planner, process_group=self._group)


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
        wrong = [name for name in keys.missing_keys if EXTRA_STATE not in name] + keys.unexpected_keys
        assert not wrong, f"the model and the loaded state differ in {wrong}"


def _random_state(parallel: Parallel) -> State:
    """This rank's random states; the key contains the number of ranks."""
    return {"random": ShardedObject(RANDOM, _own_random_state(), (parallel.world_size,), (parallel.rank,))}


def _own_random_state() -> State:
    """Random states of Python, numpy, torch, CUDA and megatron-core's tracker.

    No step uses them today: samples and folds have their own seeds. A reward function, dropout or a library may.
    """
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: State) -> None:
    """Restore what `_own_random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _raise_first(failures: Mapping[int, str | None]) -> None:
    """Raise for the first rank that failed."""
    for rank, failure in sorted(failures.items()):
        if failure is not None:
            raise RunError(f"rank {rank} cannot write the checkpoint: {failure}")


def _reason(error: BaseException) -> str:
    """First line of an error; of several ranks' errors, the lowest rank's."""
    if isinstance(error, CheckpointException):
        return _reason(error.failures[min(error.failures)][0])
    return (str(error).splitlines() or [type(error).__name__])[0]
