"""`oblr-megatron train CONFIG --dry-run [--nnodes N] [--nproc-per-node P] [--gpu-memory-gb X]`.

Imports no torch at load.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from oblr_megatron.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.dryrun.device_memory import Device

TABLE_WIDTH = 120  # minimum; a log file has no terminal width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a dry run, besides --nproc-per-node."""
    parser.add_argument(
        "--dry-run", action="store_true", help="check the run, its models and memory for all ranks without starting it"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="dry run: number of nodes")
    parser.add_argument(
        "--gpu-memory-gb", type=float, metavar="X", help="dry run: assume GPUs with X GB (1e9 bytes), present or not"
    )


def dry_run(config: Config, *, nnodes: int, per_node: int, gpu_memory_gb: float | None) -> int:
    """Check a run of nnodes * per_node ranks and print the result; writes nothing.

    Raises:
        UserError: the first problem.
    """
    from rich.console import Console

    from oblr_megatron.dryrun.checking import check_fits, not_checked
    from oblr_megatron.dryrun.examine import examine
    from oblr_megatron.dryrun.table import json_line, kinds_of, memory_table

    for flag, value in (("--nnodes", nnodes), ("--nproc-per-node", per_node)):
        if value < 1:
            raise UserError(f"{flag} {value} is below 1", where=flag, fix="give 1 or more")
    world_size, device = nnodes * per_node, device_of(config, per_node, gpu_memory_gb)
    found = examine(config, world_size, per_node, device)
    models, memory = found.models, found.memory
    print(found.model)
    print(f"{world_size} ranks, each on {device.text}; norms: {found.config.gradnorm.mode}")
    print(f"{models.total:,} parameters; models built: {len(models.holdings)}, with megatron-core's own layers")
    for line in [*filter(None, [found.idle]), *not_checked(config)]:
        print(line)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(memory_table(kinds_of(models, memory), device.num_bytes))
    check_fits(memory, config, device)
    print(json_line(models, memory, world_size))
    return EXIT_OK


def device_of(config: Config, per_node: int, gpu_memory_gb: float | None) -> Device:
    """GPUs of the given size, else this machine's GPU, else its CPU with memory divided over the ranks of a node.

    On GPUs that are not here, Transformer Engine counts as installed unless the configuration excludes it.
    """
    import torch

    from oblr_megatron.dryrun.device_memory import Device
    from oblr_megatron.memory.select_mode import free_memory

    wanted = config.model.transformer_impl != "local"
    here = torch.cuda.is_available()
    if gpu_memory_gb is None and not here:
        return Device(on_gpu=False, num_bytes=free_memory(per_node), transformer_engine=False)
    installed = importlib.util.find_spec("transformer_engine") is not None
    if gpu_memory_gb is not None:
        return Device(True, int(gpu_memory_gb * 1e9), wanted and (installed or not here))
    return Device(True, torch.cuda.get_device_properties(0).total_memory, wanted and installed)
