"""Measure conversions, Hugging Face -> torch_dist and back, against a plain copy of the same files.

    python tools/bench/convert.py --json run/bench/convert.json    Qwen3-0.6B's shape in bf16, 1.2 GB; minutes
    python tools/bench/convert.py --layers 2 --vocab 4096          the same in seconds

All reads come from the page cache. Rows:

- copy: shutil.copyfile and fsync of the weight files
- to-megatron: read the weights, write and fsync a checkpoint, read it back for its checksums
- to-hf: verify the checksums, read the checkpoint, write and fsync the weight files

`ratio_to_copy` is the median over rounds of (copy's time / row's time) in one round: 1 is the speed of a copy, more is
better. `peak_bytes` is the growth of resident memory, with libraries already loaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from meter import Meter, reset_resident_peak, resident_peak, return_freed_memory
from record import publish
from rounds import paired_ratio
from safetensors.torch import save_file

from oblr_megatron.checkpoint.convert import to_hf, to_megatron

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_smoke_model import SAMPLE_TEXTS, qwen3_0_6b, random_weights, train_tokenizer

COPY = "copy"
WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one direction.

    Example: Row(direction="to-hf", dtype="bfloat16", bytes=1192099840, rounds=5, seconds=2.1, gb_per_s=0.57,
                 ratio_to_copy=0.45, peak_bytes=650000000)
    """

    direction: str
    dtype: str
    bytes: int  # size of the tensors
    rounds: int
    seconds: float  # median
    gb_per_s: float  # 10^9 bytes
    ratio_to_copy: float  # median over rounds
    peak_bytes: int  # maximum over rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        model, num_bytes = make_directory(Path(directory) / "model", options)
        rows = measure(model, Path(directory), num_bytes, options)
    publish(rows, "conversions", options.json)


def parse_options(
    arguments: Sequence[str] | None, about: str | None = __doc__, layers: int = 28, vocab: int = 151_936
) -> argparse.Namespace:
    """Parse the command line of a benchmark described by `about`, with these default sizes."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--layers", type=int, default=layers, help="number of layers with Qwen3-0.6B's sizes")
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="parent of the temporary directory (default: the system's)")
    return parser.parse_args(arguments)


def make_directory(path: Path, options: argparse.Namespace) -> tuple[Path, int]:
    """Write a Hugging Face directory of the given shape; returns (path, bytes of its tensors)."""
    tokenizer = train_tokenizer(SAMPLE_TEXTS)
    config = qwen3_0_6b(tokenizer, options.dtype)
    layers = ["full_attention"] * options.layers
    config.update({"num_hidden_layers": options.layers, "vocab_size": options.vocab, "layer_types": layers})
    tensors = random_weights(config, num_tokens=len(tokenizer), seed=0)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, sum(tensor.nbytes for tensor in tensors.values())


def measure(model: Path, directory: Path, num_bytes: int, options: argparse.Namespace) -> list[Row]:
    """Measure every direction once per round, each after a sync. The first round is not counted."""
    checkpoint = directory / "checkpoint"
    ways: dict[str, tuple[Path, Callable[[], object]]] = {
        COPY: (directory / "copy", partial(copy_files, model, directory / "copy", WEIGHTS)),
        "to-megatron": (checkpoint, partial(to_megatron, model, checkpoint)),
        "to-hf": (directory / "hf", partial(to_hf, checkpoint, directory / "hf")),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0)
    meter = Meter(torch.device("cpu"))
    for number in range(options.rounds + 1):
        for name, (target, way) in ways.items():
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            seconds, peak = timed(way, meter)
            if number:
                times[name].append(seconds)
                peaks[name] = max(peaks[name], peak)
    return [
        Row(
            direction=name,
            dtype=options.dtype,
            bytes=num_bytes,
            rounds=options.rounds,
            seconds=statistics.median(taken),
            gb_per_s=num_bytes / statistics.median(taken) / 1e9,
            ratio_to_copy=paired_ratio(times[COPY], taken),
            peak_bytes=peaks[name],
        )
        for name, taken in times.items()
    ]


def timed(way: Callable[[], object], meter: Meter) -> tuple[float, int]:
    """(seconds, growth of peak resident memory in bytes) of one call."""
    return_freed_memory()
    reset = reset_resident_peak()
    before = resident_peak()
    seconds = meter.seconds(way)
    return seconds, resident_peak() - before if reset else 0


def copy_files(source: Path, target: Path, pattern: str = "*") -> None:
    """Copy and fsync the matching files, including those in subdirectories."""
    for file in (path for path in source.rglob(pattern) if path.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        with copy.open("rb") as stream:
            os.fsync(stream.fileno())


if __name__ == "__main__":
    main()
