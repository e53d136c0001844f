"""`oblr-megatron train CONFIG --dry-run [--nproc-per-node P]`, with `--nnodes N` or `--gpu-memory-gb X` for elsewhere.

A dry run for this machine refuses what the run would refuse. A dry run for other machines checks the files that are
here and names everything that it did not check. Imports no torch at load.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oblr_megatron.errors import EXIT_OK
from oblr_megatron.runtime.command_line import amount, count

if TYPE_CHECKING:
    from oblr_megatron.config import Config
    from oblr_megatron.preflight.device_memory import RankDevice
    from oblr_megatron.preflight.examine import DryRun

TABLE_WIDTH = 120  # minimum; a log file has no terminal width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a dry run, besides --nproc-per-node."""
    parser.add_argument(
        "--dry-run", action="store_true", help="check the run, its models and memory for all ranks without starting it"
    )
    parser.add_argument(
        "--nnodes", type=count, metavar="N", help="dry run for other machines: number of nodes (default: 1)"
    )
    parser.add_argument(
        "--gpu-memory-gb", type=amount, metavar="X", help="dry run for other machines: GPUs with X GB (1e9 bytes)"
    )


def dry_run(config: Config, ranks: int) -> int:
    """Check a run on this machine and print the result; writes nothing.

    Raises:
        UserError: the first problem.
    """
    from oblr_megatron.memory.select_mode import with_mode
    from oblr_megatron.model.precision import slow_bfloat16
    from oblr_megatron.preflight.examine import examine
    from oblr_megatron.preflight.inputs import preflight

    inputs = preflight(config, ranks)
    for line in inputs.warnings(config):
        print(line)
    if slow := slow_bfloat16(config.model):
        print(f"warning: {slow}")
    norms = inputs.norms
    decided = config if norms is None else with_mode(config, norms.mode)  # a resumed run keeps its mode
    result = examine(decided, ranks, ranks, device_of(config, ranks, None))
    return _show(result, [], config)


def dry_run_elsewhere(config: Config, nnodes: int, per_node: int, gpu_memory_gb: float | None) -> int:
    """Check a run of nnodes * per_node ranks on other machines and print the result; writes nothing.

    Raises:
        UserError: the first problem.
    """
    from oblr_megatron.preflight.examine import check_files, examine

    result = examine(config, nnodes * per_node, per_node, device_of(config, per_node, gpu_memory_gb))
    return _show(result, check_files(config, result.hf_config), config)


def _show(result: DryRun, unchecked: Sequence[str], given: Config) -> int:
    """Print warnings of the config as given, model, memory, and what was not checked; the last line is JSON."""
    from rich.console import Console

    from oblr_megatron.config.checks import biases
    from oblr_megatron.preflight.examine import check_fits
    from oblr_megatron.preflight.table import json_line, kinds_of, memory_table

    models, memory = result.models, result.memory
    for line in () if given.rollout.only else biases(given):
        print(f"warning: {line}")
    print(result.model)
    norms = "" if result.config.rollout.only else f"; norms: {result.config.gradnorm.mode}"
    print(f"{result.world_size} ranks, each on {result.device.text}{norms}")
    trained = "" if models.trained == models.total else f", {models.trained:,} trained in adapters"
    built = f"models built: {len(models.holdings)}, with megatron-core's own layers"
    print(f"{models.total:,} parameters{trained}; {built}")
    if result.idle:
        print(result.idle)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(memory_table(kinds_of(models, memory), result.device.num_bytes))
    but = "" if result.config.checkpoint.resume == "none" else ", but not the checksums of the checkpoint"
    for line in unchecked or [f"checked: everything that the run checks before it starts an engine{but}"]:
        print(f"not checked: {line}" if unchecked else line)
    check_fits(memory, result.config, result.device)
    print(json_line(models, memory, result.world_size, unchecked))
    return EXIT_OK


def device_of(config: Config, per_node: int, gpu_memory_gb: float | None) -> RankDevice:
    """GPUs of the given size, else this machine's GPU, else its CPU with memory divided over the ranks of a node.

    On GPUs that are not here, Transformer Engine counts as installed.
    """
    import torch

    from oblr_megatron.checks.machine import suits_transformer_engine
    from oblr_megatron.memory.select_mode import free_memory
    from oblr_megatron.model.precision import this_machine
    from oblr_megatron.preflight.device_memory import RankDevice

    wanted = suits_transformer_engine(config.model)
    here = torch.cuda.is_available()
    if gpu_memory_gb is None and not here:
        return RankDevice(on_gpu=False, num_bytes=free_memory(per_node), transformer_engine=False)
    installed = this_machine().transformer_engine is not None
    if gpu_memory_gb is not None:
        return RankDevice(True, int(gpu_memory_gb * 1e9), wanted and (installed or not here))
    return RankDevice(True, torch.cuda.get_device_properties(0).total_memory, wanted and installed)
