"""The parallel layout of one rank. The only module that imports megatron-core's `parallel_state`.

parallel = initialize(config.parallel)      # under torchrun, or in a single process without a port
...
shutdown()
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from oblr_megatron.checks.layout import check_world_size
from oblr_megatron.errors import EXIT_RUN, DeadlineError, RunError, UserError
from oblr_megatron.model import cpu
from oblr_megatron.runtime.gloo import share_device
from oblr_megatron.runtime.malloc import keep_freed_memory

if TYPE_CHECKING:
    from types import TracebackType

    from oblr_megatron.config import ParallelConfig

BY_LAUNCHER = "start the ranks with `oblr-megatron train --nproc-per-node N` or torchrun, which set it; else unset it"
RANK_ORDER = "tp-cp-ep-dp-pp"  # megatron-core's default: tp varies fastest, then cp


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's position in the layout, and its process groups.

    Example, rank 3 of 4 under TP2 x PP2:
        Parallel(rank=3, world_size=4, tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, dp_rank=0, dp_size=1, ...)

    A replica is the tp x cp x pp ranks that work on the same samples; dp counts replicas. Expert-parallel ranks belong
    to one pipeline stage. If ep_size * etp_size > tp_size * cp_size, they span several replicas, called a block.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vp_size: int  # model chunks of this rank; 1 without the interleaved schedule
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    sequence_parallel: bool
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_group: ProcessGroup  # the same position in every replica
    dp_cp_group: ProcessGroup  # dp_group x cp_group
    expert_group: ProcessGroup  # all ep x etp ranks that share a layer's experts; etp varies fastest
    replica_group: ProcessGroup  # the tp x cp x pp ranks of one replica
    model_group: ProcessGroup  # the replica's tp x pp ranks that hold the same part of each sequence
    block_group: ProcessGroup  # all ranks of the replicas that share experts; this replica's ranks if none do
    block_rank: int  # this replica's index within its block
    block_size: int
    expert_sum_group: ProcessGroup | None  # ranks of one replica with partial expert gradients; None if they are whole
    embedding_group: ProcessGroup | None  # first and last stage; None on the stages between
    device: torch.device
    timeout_s: float  # of every collective
    places: tuple[Position, ...]  # of every rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's position in each of its groups, computed without communication.

    Example, rank 3 of 4 under TP2 x PP2: Position(tp=1, pp=1, cp=0, dp=0, ep=0, etp=1, expert_peers=3)
    """

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    expert_peers: int  # the lowest rank that holds the same shards of the same experts


def positions(world_size: int, *, tp: int, pp: int, cp: int, ep: int, etp: int) -> list[Position]:
    """The position of every rank, in megatron-core's rank order.

    The sizes of tensor, pipeline, context, expert and expert-tensor parallelism must divide the number of ranks
    (`checks.layout.check_world_size`).
    """
    from megatron.core.parallel_state import RankGenerator

    dense = RankGenerator(tp=tp, ep=1, dp=world_size // (tp * pp * cp), pp=pp, cp=cp, order=RANK_ORDER)
    expert = RankGenerator(tp=etp, ep=ep, dp=world_size // (etp * ep * pp), pp=pp, cp=1, order=RANK_ORDER)
    places: list[dict[str, int]] = [{} for _ in range(world_size)]
    for name, generator, token in [
        *((name, dense, name) for name in ("tp", "pp", "cp", "dp")),
        ("ep", expert, "ep"),
        ("etp", expert, "tp"),
    ]:
        for group in generator.get_ranks(token):
            for index, rank in enumerate(group):
                places[rank][name] = index
    for group in expert.get_ranks("dp"):
        for rank in group:
            places[rank]["expert_peers"] = min(group)
    return [Position(**position) for position in places]


def rank_from_environment() -> tuple[int, int]:
    """(rank, world size) from torchrun's environment; (0, 1) without torchrun.

    Raises:
        UserError: they are no numbers, or the rank is not below the world size.
    """
    rank, world_size = _of_launcher("RANK", 0), _of_launcher("WORLD_SIZE", 1)
    if rank >= world_size:
        what = f"RANK is {rank}, and WORLD_SIZE is {world_size}"
        raise UserError(what, where="environment", fix=BY_LAUNCHER)
    return rank, world_size


def checked_rendezvous() -> tuple[int, int]:
    """`rank_from_environment`; refuses (UserError) several ranks without the address and port where they meet."""
    rank, world_size = rank_from_environment()
    if world_size == 1 or dist.is_initialized():
        return rank, world_size
    if not os.environ.get("MASTER_ADDR"):
        what = f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set"
        raise UserError(what, where="environment", fix=BY_LAUNCHER)
    if not 0 < _of_launcher("MASTER_PORT", 0) < 2**16:
        what = f"MASTER_PORT is {os.environ.get('MASTER_PORT', 'not set')}"
        raise UserError(what, where="environment", fix=BY_LAUNCHER)
    if not os.environ.get("RANK"):
        raise UserError(f"WORLD_SIZE is {world_size}, but RANK is not set", where="environment", fix=BY_LAUNCHER)
    return rank, world_size


def _of_launcher(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isdecimal() and text.isascii()):
        raise UserError(f"{name} is {text!r}, not a number", where="environment", fix=BY_LAUNCHER)
    return int(text)


def select_device() -> None:
    """Make this rank's GPU the current one, before any other CUDA call; does nothing without GPUs.

    Many calls, such as `torch.cuda.mem_get_info`, create a context on the current device. By default that is GPU 0, so
    every rank of a node would hold about 0.5 GiB there for the whole run.

    Raises:
        UserError: the process sees fewer GPUs than ranks of its node.
    """
    if not torch.cuda.is_available():
        return
    rank, count = local_rank(), torch.cuda.device_count()
    if rank >= count:
        what = f"LOCAL_RANK is {rank}, but this process sees {count} GPU{'s' if count > 1 else ''}"
        raise UserError(what, where="environment", fix="start as many ranks on a node as each process sees GPUs")
    torch.cuda.set_device(rank)


def local_rank() -> int:
    """This rank's number on its node, from torchrun's environment; 0 without torchrun."""
    return _of_launcher("LOCAL_RANK", 0)


def local_world_size(world_size: int) -> int:
    """Ranks of this node, from torchrun's environment; without torchrun all ranks run here."""
    return _of_launcher("LOCAL_WORLD_SIZE", world_size)


def join(config: ParallelConfig, *, alone: bool = False) -> None:
    """Join the process group, or keep an existing one. Of the config only the timeout is read; see `initialize`."""
    if cpu.install():
        share_device()
        keep_freed_memory()
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=config.distributed_timeout_s)
    select_device()
    if not alone and rank_from_environment()[1] > 1:  # torchrun's rendezvous
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            rank, world_size = rank_from_environment()
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            what = f"rank {rank} did not find all of the {world_size} ranks at {address}"
            raise RunError(f"{what}: {str(error).splitlines()[0]}") from None
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def initialize(config: ParallelConfig, *, seed: int = 0, alone: bool = False) -> Parallel:
    """Join the process group, NCCL's with CUDA and else gloo's, or keep an existing one; create megatron-core's groups.

    Args:
        config: the layout.
        seed: for megatron-core's random states, which nothing draws from; torch's CPU generator is unchanged.
        alone: whether this process is the only rank, also in a launcher's environment.

    Raises:
        UserError: the number of ranks does not fit the layout. No process group was created.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    started = 1 if alone else rank_from_environment()[1]
    check_world_size(config, dist.get_world_size() if dist.is_initialized() else started)
    join(config, alone=alone)
    timeout = timedelta(seconds=config.distributed_timeout_s)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        order=RANK_ORDER,
        distributed_timeout_minutes=config.distributed_timeout_s / 60,  # it makes a timedelta, which takes fractions
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return from_megatron(
        vp_size=config.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=config.sequence_parallel,
        timeout=timeout,
    )


def shutdown(*, keep_process_group: bool = False) -> None:
    """Destroy megatron-core's groups and leave the process group, if there is one.

    With `keep_process_group` stay in it, so that the same processes can initialize another layout.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if not keep_process_group:
        dist.destroy_process_group()
        return
    # megatron-core only forgets its groups. Each would keep its sockets and threads (about fifty under gloo).
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """The end of a block that joined: `shutdown`, but a rank may stay in its groups, and `end_process` ends it.

    Destroying a group waits for its collectives. Under NCCL they wait for this rank, so after an exception no rank
    would end. Under gloo one that missed its deadline ends with the others' connections, which may stay for ever.
    """
    if kind is not None and dist.is_initialized():
        gave_up = isinstance(error, DeadlineError) and dist.get_world_size() > 1
        if gave_up or dist.get_backend() == "nccl":
            return
    shutdown()


def end_process(main: Callable[[], int]) -> NoReturn:
    """Run a rank's main function and exit with its status.

    A rank that is still in a process group ends at once: Python's teardown would destroy the group, see `leave`.
    """
    try:
        status = main()
    except Exception:  # any error: this rank must end without Python's teardown
        if not dist.is_initialized():
            raise
        traceback.print_exc()
        status = EXIT_RUN
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def from_megatron(*, vp_size: int, sequence_parallel: bool, timeout: timedelta = timedelta(minutes=10)) -> Parallel:
    """This rank's position and groups after megatron-core's `initialize_model_parallel`. Collective.

    Args:
        vp_size: model chunks of this rank.
        sequence_parallel: whether the model splits sequences over tensor-parallel ranks.
        timeout: of the collectives of groups that megatron-core does not have.

    Raises:
        UserError: megatron-core's groups are not there, or its ranks are not in the default order.
    """
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise UserError(
            "megatron-core's process groups do not exist",
            where="parallel_state",
            fix="call megatron.core.parallel_state.initialize_model_parallel first",
        )
    embedding_group = state.get_embedding_group(check_initialized=False)
    if embedding_group is not None and dist.get_rank() not in dist.get_process_group_ranks(embedding_group):
        embedding_group = None
    dp_rank, dp_size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    cp_group, model_group = state.get_context_parallel_group(), state.get_model_parallel_group()
    tp_size, pp_size = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    ep_size, etp_size = state.get_expert_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    shards, experts = tp_size * cp_group.size(), ep_size * etp_size  # ranks of a stage that share a sample; its experts
    block_size = max(1, experts // shards)
    places = positions(dist.get_world_size(), tp=tp_size, pp=pp_size, cp=cp_group.size(), ep=ep_size, etp=etp_size)
    _check_order(places[dist.get_rank()])
    replica_group = model_group if cp_group.size() == 1 else _group_by([place.dp for place in places], timeout)
    block_group = replica_group
    if block_size > 1:
        block_group = _group_by([place.dp // block_size for place in places], timeout)
    expert_sum_group = None
    if experts < shards:
        expert_sum_group = _group_by([(place.dp, place.expert_peers) for place in places], timeout)
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=tp_size,
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=pp_size,
        vp_size=vp_size,
        cp_rank=state.get_context_parallel_rank(),
        cp_size=cp_group.size(),
        dp_rank=dp_rank,
        dp_size=dp_size,
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=ep_size,
        etp_rank=state.get_expert_tensor_parallel_rank(),
        etp_size=etp_size,
        sequence_parallel=sequence_parallel,
        tp_group=state.get_tensor_model_parallel_group(),
        pp_group=state.get_pipeline_model_parallel_group(),
        cp_group=cp_group,
        dp_group=state.get_data_parallel_group(),
        dp_cp_group=state.get_data_parallel_group(with_context_parallel=True),
        expert_group=state.get_expert_tensor_and_model_parallel_group(),
        replica_group=replica_group,
        model_group=model_group,
        block_group=block_group,
        block_rank=dp_rank % block_size,
        block_size=block_size,
        expert_sum_group=expert_sum_group,
        embedding_group=embedding_group,
        device=_device(),
        timeout_s=timeout.total_seconds(),
        places=tuple(places),
    )


def _check_order(place: Position) -> None:
    """Refuse ranks in another order than `positions` assumes. Collective."""
    from megatron.core import parallel_state as state

    kinds = {
        "tensor_model_parallel": place.tp,
        "pipeline_model_parallel": place.pp,
        "context_parallel": place.cp,
        "data_parallel": place.dp,
        "expert_model_parallel": place.ep,
        "expert_tensor_parallel": place.etp,
    }
    moved = any(getattr(state, f"get_{kind}_rank")() != rank for kind, rank in kinds.items())
    differs = torch.tensor(int(moved), device=_device())
    dist.all_reduce(differs)
    if differs:
        raise UserError(
            f"{int(differs)} ranks are not where megatron-core's order {RANK_ORDER!r} has them",
            where="parallel_state",
            fix="leave `order` of initialize_model_parallel at its default",
        )


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def share_group(parallel: Parallel, size: int) -> ProcessGroup | None:
    """The group of this rank's position in `size` neighbouring replicas; None for size 1. Collective."""
    if size == 1:
        return None
    keys = [(place.tp, place.pp, place.cp, place.dp // size) for place in parallel.places]
    return _group_by(keys, timedelta(seconds=parallel.timeout_s))


def _group_by(keys: Sequence[object], timeout: timedelta) -> ProcessGroup:
    """The group of all ranks with this rank's key, for combinations that megatron-core has no group for.

    There is one key for every rank, and the list is the same on all ranks.
    """
    groups = {}
    for which in dict.fromkeys(keys):  # collective: every rank creates every group
        ranks = [rank for rank, candidate in enumerate(keys) if candidate == which]
        groups[which] = dist.new_group(ranks, timeout=timeout)
    return groups[keys[dist.get_rank()]]
