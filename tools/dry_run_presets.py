"""Dry-run every layout preset of slurm/configs at its own size and at larger ones.

    .venv/bin/python tools/dry_run_presets.py [--nodes 32 128] [--presets qwen3_8b] [--set KEY=VALUE ...] [--json OUT]

Prints one line per preset and number of nodes: parameters, memory of the fullest rank, share of the GPU, the planner's
seconds of a step on H100s with responses of half the longest length, wall seconds and CPU seconds. Nodes have 8 GPUs of
80 GB. If there are more replicas than folds, folds and prompts are raised to one
per replica.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oblr_megatron.config import Config, load_config
from oblr_megatron.memory.pass_plan import Layout
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.preflight.device_memory import RankDevice
from oblr_megatron.preflight.examine import DryRun, check_fits, examine, model_of
from oblr_megatron.runtime.command_line import guarded

PRESETS = Path(__file__).parent.parent / "slurm" / "configs"
PER_NODE = 8
DEVICE = RankDevice(on_gpu=True, num_bytes=80 * 10**9, transformer_engine=True)
LARGER = (16, 128)  # nodes: 128 and 1,024 ranks


@dataclass(frozen=True, slots=True)
class Row:
    """One dry run. Example: Row("qwen3_8b", nodes=1, found=DryRun(...), seconds=1.2, core_seconds=1.1)"""

    preset: str
    nodes: int
    found: DryRun
    seconds: float
    core_seconds: float


def nodes_of(preset: Path) -> int:
    """The number of nodes in a preset's first line."""
    first = preset.read_text(encoding="utf-8").splitlines()[0]
    named = re.search(r" on (\d+) nodes?\b", first)
    assert named is not None, f"{preset.name}: the first line has no number of nodes"
    return int(named[1])


def at_size(preset: Path, nodes: int, changes: Sequence[str] = ()) -> Config:
    """A preset with at least one fold and one prompt per replica (or per group of replicas that share a fold)."""
    config = load_config(preset, changes)
    hf_config, _ = model_of(config.model.path)
    layout = Layout.of(hf_config, config, nodes * PER_NODE)
    folds = max(config.algo.snr.num_folds, layout.replicas // layout.block)
    prompts = max(config.num_prompts, folds)
    return load_config(preset, [*changes, f"algo.snr.num_folds={folds}", f"num_prompts={prompts}"])


def step_seconds(hf_config: Mapping[str, Any], config: Config, world_size: int) -> float:
    """The planner's seconds of a step, with responses of half the longest length; `gradnorm.mode` is chosen."""
    from oblr_megatron.extras.planner.constants import PlannerMachine
    from oblr_megatron.extras.planner.cost import predict
    from oblr_megatron.extras.planner.setting import Setting

    mean = config.rollout.max_response_tokens // 2
    machine = PlannerMachine(device_named("h100"))
    return predict(Setting(hf_config, config, world_size, machine, mean, transformer_engine=True)).seconds


def examined(preset: Path, nodes: int, changes: Sequence[str] = ()) -> Row:
    """Dry-run a preset with some keys changed ("section.key=value").

    Raises:
        UserError: the layout does not divide the model, or does not fit.
    """
    start, core = time.perf_counter(), time.process_time()
    config = at_size(preset, nodes, changes)
    found = examine(config, nodes * PER_NODE, PER_NODE, DEVICE)
    check_fits(found.memory, config, DEVICE)
    return Row(preset.stem, nodes, found, time.perf_counter() - start, time.process_time() - core)


def rows(larger: tuple[int, ...], names: Sequence[str], changes: Sequence[str]) -> Iterator[Row]:
    """The named presets, by default all, at their own number of nodes and at the larger sizes."""
    for preset in sorted(PRESETS.glob("*.toml"), key=lambda path: (nodes_of(path), path.name)):
        own = nodes_of(preset)
        for nodes in (own, *(size for size in larger if size > own)):
            if not names or preset.stem in names:
                yield examined(preset, nodes, changes)


def main() -> int:
    """Print the table; write the results with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=list(LARGER), help="larger sizes, in nodes of 8 GPUs")
    names = sorted(path.stem for path in PRESETS.glob("*.toml"))
    parser.add_argument("--presets", nargs="*", default=[], choices=names, help="names of presets; by default all")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys to change in every preset")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    options = parser.parse_args()
    assert DEVICE.num_bytes is not None
    table = Table(
        "preset",
        "nodes",
        "ranks",
        "parameters",
        "built",
        "training GB",
        "sampling GB",
        "full",
        "step s",
        "seconds",
        "core",
    )
    metrics = []
    for row in rows(tuple(options.nodes), options.presets, options.set):
        training, rollout = (max(getattr(one, name) for one in row.found.memory) for name in ("training", "rollout"))
        metrics.append(
            {
                "preset": row.preset,
                "nodes": row.nodes,
                "ranks": row.nodes * PER_NODE,
                "parameters": row.found.models.total,
                "built": len(row.found.models.holdings),
                "training_bytes": training,
                "rollout_bytes": rollout,
                "share": row.found.peak / DEVICE.num_bytes,
                "step_s": step_seconds(row.found.hf_config, row.found.config, row.found.world_size),
                "seconds": row.seconds,
                "core_seconds": row.core_seconds,
            }
        )
        table.add_row(
            row.preset,
            str(row.nodes),
            f"{row.nodes * PER_NODE:,}",
            f"{row.found.models.total:,}",
            str(len(row.found.models.holdings)),
            f"{training / 1e9:.1f}",
            f"{rollout / 1e9:.1f}",
            f"{row.found.peak / DEVICE.num_bytes:.0%}",
            f"{metrics[-1]['step_s']:.0f}",
            f"{row.seconds:.1f}",
            f"{row.core_seconds:.1f}",
        )
    Console(width=120).print(table)
    print(f"{len(metrics)} dry runs in {sum(row['seconds'] for row in metrics):.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": metrics}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
