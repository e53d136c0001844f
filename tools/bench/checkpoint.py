"""Measure saving and loading a checkpoint against a plain copy of its files.

    python tools/bench/checkpoint.py --json run/bench/checkpoint.json     six layers of Qwen3-0.6B's sizes in bf16, Adam
    python tools/bench/checkpoint.py --layers 2 --vocab 4096              the same in seconds

Runs on one rank. All reads come from the page cache. Rows:

- copy: shutil.copyfile and fsync of all files of a checkpoint
- blocked: time that the step loop waits for a background save, that is, for the copy of the state to host memory
- save: the whole save until the checkpoint is committed: copy, files, fsync, checksums read back
- load: checksums, and the state restored

`ratio_to_copy` is the median over rounds of (copy's time / row's time) in one round: 1 is the speed of a copy, more is
better.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from convert import COPY, copy_files, make_directory, parse_options
from record import publish
from rounds import paired_ratio
from transformers import AutoConfig

from oblr_megatron.checkpoint.distributed import load_training_state, training_state
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.saver import Saver
from oblr_megatron.checkpoint.store import check_contents, checkpoints_of, read_manifest
from oblr_megatron.config import Config, parse_config
from oblr_megatron.model.optimizer import PolicyOptimizer
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy


@dataclass(frozen=True, slots=True)
class Row:
    """One operation. Example: Row(what="save", bytes=2_100_000_000, rounds=5, seconds=3.1, ratio_to_copy=0.6)"""

    what: str
    bytes: int  # size of the checkpoint's files
    rounds: int
    seconds: float  # median
    ratio_to_copy: float  # median over rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments, __doc__, layers=6, vocab=32_768)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        rows = measure(Path(directory), options)
    publish(rows, "checkpoints", options.json)


def measure(directory: Path, options: argparse.Namespace) -> list[Row]:
    """Measure every operation once per round, each after a sync. The first round is not counted."""
    model, _ = make_directory(directory / "model", options)
    config = config_of(model, directory / "run", options.dtype)
    parallel = initialize(config.parallel)
    policy = build_policy(AutoConfig.from_pretrained(model), config.model, parallel)
    load_hf_weights(policy, model)
    optimizer = PolicyOptimizer(policy, config.optimizer)
    saver = Saver(config, parallel, check_hf_dir(model))
    times: dict[str, list[float]] = {name: [] for name in (COPY, "blocked", "save", "load")}
    num_bytes = 0
    for number in range(options.rounds + 1):
        taken: dict[str, float] = {}
        os.sync()
        begin = time.perf_counter()
        saver.save(number, training_state(policy, optimizer), {}, {})
        taken["blocked"] = time.perf_counter() - begin
        saved = saver.wait()
        taken["save"] = time.perf_counter() - begin
        assert saved is not None and saved.failure is None, saved
        newest = checkpoints_of(config.run_dir)[0]
        taken["load"] = seconds(partial(load, newest, policy, optimizer))
        os.sync()
        taken[COPY] = seconds(partial(copy_files, newest, directory / "copy"))
        shutil.rmtree(directory / "copy")
        num_bytes = saved.num_bytes
        for name, value in taken.items():
            times[name] += [value] if number else []
    shutdown()
    return [
        Row(name, num_bytes, options.rounds, statistics.median(found), paired_ratio(times[COPY], found))
        for name, found in times.items()
    ]


def config_of(model: Path, run_dir: Path, dtype: str) -> Config:
    """The config of a run with checkpoints."""
    table = {"run_dir": str(run_dir), "model": {"path": str(model), "dtype": dtype}, "data": {"train": "unused"}}
    return parse_config(table | {"checkpoint": {"keep_last": 1}})


def load(path: Path, policy: object, optimizer: object) -> None:
    """Load a checkpoint as `--resume` does."""
    manifest = read_manifest(path)
    check_contents(path, manifest, manifest.files)
    load_training_state(policy, optimizer, path)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
