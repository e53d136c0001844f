"""Measure a push of weights from trainer to engine through shared memory, against a plain copy and against files.

    python tools/bench/push.py --json run/bench/push.json          Qwen3-0.6B's shape in bf16, 1.2 GB; minutes
    python tools/bench/push.py --layers 2 --vocab 4096             the same in seconds

The trainer is this process, with one thread and a megatron-core policy with random weights. The engine is a vLLM engine
process with one thread, started from a checkpoint. Rows:

- memcpy: copy the same bytes, parameter by parameter, from the policy into shared memory
- push: the push after every step of a run
- push, verify: the same with weights.verify on
- push, cast: an fp32 policy is sent as bf16 (`bytes` counts bf16)
- save + reload: safetensors writes the tensors without fsync; another vLLM engine reads them with load_file and
  `model.load_weights`

`ratio_to_memcpy` is the median over rounds of (memcpy's time / row's time) in one round: 1 is the bandwidth of a copy,
more is better.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from meter import Meter
from record import publish
from rounds import paired_ratio
from safetensors.torch import save_file
from shapes import randomize

from oblr_megatron.config import ModelConfig, ParallelConfig, WeightsConfig
from oblr_megatron.engine.handle import Deadlines, VllmEngine, child_environment
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.rollout.push import Pusher
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.shm import SharedBuffer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_smoke_model import SAMPLE_TEXTS, qwen3_0_6b, train_tokenizer

MEMCPY, RELOAD = "memcpy", "save + reload"
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one transport.

    Example: Row(transport="push", bytes=1192099840, rounds=7, seconds=0.19, gb_per_s=6.3,
                 ratio_to_memcpy=0.66)
    """

    transport: str
    bytes: int
    rounds: int
    seconds: float  # median
    gb_per_s: float  # 10^9 bytes
    ratio_to_memcpy: float  # median over rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    torch.set_num_threads(1)
    parallel = initialize(ParallelConfig())
    try:
        with ExitStack() as stack:
            ways, num_bytes = build_ways(options, parallel, stack)
            rows = measure(ways, num_bytes, options)
    finally:
        shutdown()
    publish(rows, "a push of weights", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--layers", type=int, default=28, help="number of layers with Qwen3-0.6B's sizes")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="+", help="only these, besides memcpy")
    return parser.parse_args(arguments)


def build_ways(
    options: argparse.Namespace, parallel: Parallel, stack: ExitStack
) -> tuple[dict[str, Callable[[], object]], int]:
    """({name: transport}, bytes that each transport moves)."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    policy = random_policy(directory, options, parallel, "bfloat16")
    wide = random_policy(directory, options, parallel, "float32")
    source = MegatronWeights(policy)
    save_file(own_tensors(source), directory / "model.safetensors", metadata={"format": "pt"})
    ways: dict[str, Callable[[], object]] = {MEMCPY: memcpy(policy, stack)}
    engine = start_engine(directory, stack)
    usual = WeightsConfig()
    for name, weights, config in (
        ("push", source, usual),
        ("push, verify", source, usual.model_copy(update={"verify": True})),
        ("push, cast", MegatronWeights(wide, torch.bfloat16), usual),
    ):
        ways[name] = partial(Pusher(engine, parallel.device, config).push, weights, version=1)
    if options.rows is None or RELOAD in options.rows:
        ways[RELOAD] = Reloader(source, directory, stack)
    kept = {name: way for name, way in ways.items() if options.rows is None or name in (MEMCPY, *options.rows)}
    return kept, sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in source.metadata())


def random_policy(directory: Path, options: argparse.Namespace, parallel: Parallel, dtype: str) -> Policy:
    """Build a policy of the given shape; write its config and a tokenizer to the directory."""
    tokenizer = train_tokenizer(SAMPLE_TEXTS)
    config = qwen3_0_6b(tokenizer, "bfloat16")
    config.update({"num_hidden_layers": options.layers, "vocab_size": options.vocab, "layer_types": None})
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    policy = build_policy(config, ModelConfig.model_validate({"path": directory, "dtype": dtype}), parallel)
    randomize(policy.named_parameters())
    return policy


def own_tensors(source: MegatronWeights) -> dict[str, torch.Tensor]:
    """The source's tensors, contiguous as safetensors requires."""
    return {name: tensor.contiguous() for name, tensor in source}


def memcpy(policy: Policy, stack: ExitStack) -> Callable[[], None]:
    """A call that copies every parameter into one shared buffer, with the C library's memcpy."""
    parameters = [parameter.detach() for _, parameter in policy.named_parameters()]
    buffer = SharedBuffer.create()
    stack.callback(buffer.close)
    buffer.reserve(sum(parameter.nbytes for parameter in parameters))

    def copy() -> None:
        place = buffer.bytes.data_ptr()
        for parameter in parameters:
            ctypes.memmove(place, parameter.data_ptr(), parameter.nbytes)
            place += parameter.nbytes

    return copy


def spec_of(directory: Path, name: str) -> EngineSpec:
    """A small engine with one thread; it generates nothing except during its start."""
    return EngineSpec(
        name=name,
        model=directory,
        dtype="bfloat16",
        device="cpu",
        max_model_len=64,
        max_num_seqs=1,
        kv_cache_bytes=2**26,
        num_threads=1,
    )


def start_engine(directory: Path, stack: ExitStack) -> VllmEngine:
    """Start an engine process like a run's."""
    deadlines = Deadlines(DEADLINE_S, DEADLINE_S, DEADLINE_S, DEADLINE_S)
    spec = spec_of(directory, "engine 0")
    engine = VllmEngine(spec, owner="the benchmark", log=directory / "engine.log", deadlines=deadlines)
    stack.callback(engine.close)
    engine.wait_ready()
    return engine


class Reloader:
    """The transport through files: save here, load in an engine of `push_reload.py`."""

    def __init__(self, source: MegatronWeights, directory: Path, stack: ExitStack) -> None:
        """Start that engine from the directory and wait until it is ready."""
        self._source, self._file = source, directory / "again.safetensors"
        spec = spec_of(directory, "engine 1")
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("push_reload.py")), str(directory), str(self._file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(directory / "reload.log").open("w"),
                env=child_environment(os.environ, spec),
                text=True,
            )
        )
        stack.callback(self._process.kill)
        self._wait("ready")

    def __call__(self) -> None:
        """Save and reload once."""
        save_file(own_tensors(self._source), self._file)
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write("load\n")
        self._process.stdin.flush()
        self._wait("loaded")

    def _wait(self, word: str) -> None:
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise RuntimeError("the engine that reloads has died")


def measure(ways: dict[str, Callable[[], object]], num_bytes: int, options: argparse.Namespace) -> list[Row]:
    """Measure every transport once per round, in alternating order. The first round is not counted."""
    meter = Meter(torch.device("cpu"))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            seconds = meter.seconds(ways[name])
            if number:
                times[name].append(seconds)
    return [row(name, own, times[MEMCPY], num_bytes) for name, own in times.items()]


def row(name: str, own: Sequence[float], plain: Sequence[float], num_bytes: int) -> Row:
    """One transport's row, from its times and memcpy's times by round."""
    seconds = statistics.median(own)
    return Row(
        transport=name,
        bytes=num_bytes,
        rounds=len(own),
        seconds=seconds,
        gb_per_s=num_bytes / seconds / 1e9,
        ratio_to_memcpy=paired_ratio(plain, own),
    )


if __name__ == "__main__":
    main()
