"""A policy and its optimizer as one torch_dist checkpoint of megatron-core, whatever the layout that reads it.

    writer = TorchDistWriter(group, policy.parallel)
    write = writer.stage(training_state(policy, optimizer), directory)    # collective; the state may change afterwards
    write()                                                             # collective; may run in a thread

    load_training_state(policy, optimizer, directory)      # collective, under any TP, PP, EP, VPP and DP
    load_weights(policy, directory)                        # the weights alone, fp32 masters not among them

megatron-core's own asynchronous save forks the trainer and keeps a manager process: its children hold the sockets of a
rank that was killed, so that the others wait for a dead peer, and the manager outlives it. Here the state is copied to
host memory and torch.distributed.checkpoint writes it from a thread, with a process group of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from torch.distributed.checkpoint import CheckpointException

from oblr_megatron.checkpoint.random_state import random_state, set_random_state
from oblr_megatron.checkpoint.torch_files import BACKEND, VERSION, TensorFiles, plain_files, save_common
from oblr_megatron.errors import RunError

if TYPE_CHECKING:
    from oblr_megatron.model.momentum import GradientMomentum
    from oblr_megatron.model.optimizer import PolicyOptimizer
    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.qwen3 import Policy

RANDOM = "random_state"
EXTRA_STATE = "_extra_state"  # of torch's modules, in names of what they save beside parameters
State = dict[str, Any]
"""megatron-core's sharded state dict: nested, with a ShardedTensor for each tensor."""


def model_state(policy: Policy) -> State:
    """The weights; a tensor's key is its name in a GPTModel, its place that in the whole model.

    What Transformer Engine's modules would add, delayed FP8's history of scales, is left out: a checkpoint is the same
    whosever layers wrote it, and a run in delayed FP8 that goes on begins a new history.
    """
    states = [chunk.module.sharded_state_dict() for chunk in policy.chunks]
    return {
        f"model{index}": {name: value for name, value in state.items() if EXTRA_STATE not in name}
        for index, state in enumerate(states)
    }


def training_state(policy: Policy, optimizer: PolicyOptimizer, momentum: GradientMomentum | None = None) -> State:
    """Weights, fp32 masters, moments, the gradients' average if one is kept, and the random states of every rank.

    To be saved, or to be read into.
    """
    model = model_state(policy)
    state = model | {"optimizer": optimizer.sharded_state_dict(model)}
    if momentum is not None:
        state["momentum"] = momentum.sharded_state_dict(model)
    return state | _random_state(policy.parallel)


def load_weights(policy: Policy, directory: Path) -> None:
    """Fill the weights; collective. An optimizer made before keeps the masters it has.

    Raises:
        RunError: the checkpoint does not hold them.
    """
    state = model_state(policy)
    _set_weights(policy, _load(state, directory))


def load_training_state(
    policy: Policy, optimizer: PolicyOptimizer, directory: Path, momentum: GradientMomentum | None = None
) -> None:
    """Fill weights, masters, moments and the gradients' average if one is kept; collective.

    The random states as well, where the ranks are as many as they were.

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
        set_random_state(loaded["random"])


class TorchDistWriter:
    """Writes one checkpoint after another; the plan of who writes what is made once.

    Args:
        group: of all ranks, on the CPU, in which nothing else happens while a checkpoint is written.
        parallel: the layout.
    """

    def __init__(self, group: dist.ProcessGroup, parallel: Parallel) -> None:
        self._rank, self._group = parallel.rank, group
        # Replicas hold the same weights, and each writes a share of them.
        self._strategy = FullyParallelSaveStrategyWrapper(
            _ThreadStrategy(self._group), parallel.dp_cp_group, do_cache_distribution=True
        )
        self._validated = False

    def stage(self, state: State, directory: Path, *, copy: bool = True) -> Callable[[], None]:
        """Copy what this rank is to write; collective.

        Args:
            state: see `training_state`.
            directory: exists, is empty, and is seen by every rank.
            copy: the state will change before it is written.

        Returns the rest of the work, collective as well, for any thread: it raises RunError if a rank cannot write.
        """
        self._strategy.base_strategy.copy = copy
        sharded, common = save_preprocess(state, not self._validated)
        self._validated = True
        request = self._strategy.async_save(sharded, directory)
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
    """megatron-core's torch_dist format, written by torch.distributed.checkpoint in one process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(BACKEND, VERSION)
        self.copy = True
        self._group = group

    def async_save(self, sharded_state_dict: State, checkpoint_dir: Path) -> AsyncRequest:
        """Copy the tensors that this rank writes; the request's function is the rest."""
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
            warnings.simplefilter("ignore", FutureWarning)  # megatron-core calls torch by names that will go
            return dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, CheckpointException) as error:
        reason = _reason(error)
        raise RunError(f"the checkpoint {directory} does not fit this model and optimizer: {reason}") from error


def _set_weights(policy: Policy, loaded: State) -> None:
    for index, chunk in enumerate(policy.chunks):
        keys = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
        wrong = [name for name in keys.missing_keys if EXTRA_STATE not in name] + keys.unexpected_keys
        assert not wrong, f"the model and what was loaded differ in {wrong}"


def _random_state(parallel: Parallel) -> State:
    """Each rank's own, under a key that says how many ranks there are."""
    return {"random": ShardedObject(RANDOM, random_state(), (parallel.world_size,), (parallel.rank,))}


def _raise_first(failures: Mapping[int, str | None]) -> None:
    """Raise for the first rank that failed."""
    for rank, failure in sorted(failures.items()):
        if failure is not None:
            raise RunError(f"rank {rank} cannot write the checkpoint: {failure}")


def _reason(error: BaseException) -> str:
    """The first line of what went wrong; of several ranks, the first one's."""
    if isinstance(error, CheckpointException):
        return _reason(error.failures[min(error.failures)][0])
    return (str(error).splitlines() or [type(error).__name__])[0]
