"""What a conversion costs: Hugging Face -> torch_dist and back, against a plain copy of the same files.

    python tools/bench/convert.py --json run/bench/convert.json    Qwen3-0.6B's shape in bf16, 1.2 GB; minutes
    python tools/bench/convert.py --layers 2 --vocab 4096          the same in seconds

`copy` is shutil.copyfile and fsync of the weight files. `to-megatron` reads them, writes a checkpoint, brings it to
the disk and reads it back for its checksums; `to-hf` checks the checksums, reads the checkpoint, writes the weight
files and brings them to the disk. All that is read is in the page cache. `ratio_to_copy` is the median over rounds of
the copy's time to a row's, both of the same round: 1 is the speed of a copy, and more is better. `peak_bytes` is
resident memory over what the process held before, libraries loaded.
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
    """One way.

    Example: Row(direction="to-hf", dtype="bfloat16", bytes=1192099840, rounds=5, seconds=2.1, gb_per_s=0.57,
                 ratio_to_copy=0.45, peak_bytes=650000000)
    """

    direction: str
    dtype: str
    bytes: int  # of the tensors
    rounds: int
    seconds: float  # median
    gb_per_s: float  # 10^9 bytes
    ratio_to_copy: float  # median of the ratios of each round
    peak_bytes: int  # largest of all rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the figures."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        model, num_bytes = make_directory(Path(directory) / "model", options)
        rows = measure(model, Path(directory), num_bytes, options)
    publish(rows, "conversions", options.json)


def parse_options(
    arguments: Sequence[str] | None, about: str | None = __doc__, layers: int = 28, vocab: int = 151_936
) -> argparse.Namespace:
    """The command line; of a benchmark that says `about` itself, with these sizes where none are given."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--layers", type=int, default=layers, help="of Qwen3-0.6B's sizes")
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, help="write in a directory below this one; by default the system's for them"
    )
    return parser.parse_args(arguments)


def make_directory(path: Path, options: argparse.Namespace) -> tuple[Path, int]:
    """A Hugging Face directory of the shape asked for, and the bytes of its tensors."""
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
    """Every way once a round, each after the disk has come to rest, and one round before that is not counted."""
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
    """Seconds, and resident memory at the fullest moment over what was resident before."""
    return_freed_memory()
    reset = reset_resident_peak()
    before = resident_peak()
    seconds = meter.seconds(way)
    return seconds, resident_peak() - before if reset else 0


def copy_files(source: Path, target: Path, pattern: str = "*") -> None:
    """Copy the files that match, those in subdirectories as well, and bring them to the disk."""
    for file in (path for path in source.rglob(pattern) if path.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        with copy.open("rb") as stream:
            os.fsync(stream.fileno())


if __name__ == "__main__":
    main()
