"""One process that takes the place of any rank of a run: megatron-core's groups without communication.

    with standing_as(rank, world_size, config.parallel) as parallel:
        ...                     # the groups of this rank, and torch.distributed as it would see it

Collectives of torch's fake process group return at once and change nothing. This suffices to build models. All tensors
are on the "meta" device: shapes without memory. No GPU is used, also where there are some.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model import cpu
from oblr_megatron.model.parallel import Parallel, initialize, shutdown


@contextmanager
def standing_as(rank: int, world_size: int, config: ParallelConfig) -> Iterator[Parallel]:
    """Join a fake process group of `world_size` ranks and create megatron-core's groups.

    Raises:
        UserError: the number of ranks does not fit the layout.
    """
    served = dist.Backend.backend_capability[dist.Backend.FAKE]
    if cpu.META.type not in served:  # tied embeddings run a collective when they are built
        served.append(cpu.META.type)
    with cpu.without_gpus():
        dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world_size)
        try:
            parallel = initialize(config)
            with cpu.on_meta():
                yield replace(parallel, device=cpu.META)
        finally:
            shutdown()
