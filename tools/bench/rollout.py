"""Measure rollout speed: a run's engines against a bare `vllm.LLM.generate` with the same model, prompts and threads.

    python tools/bench/rollout.py --json run/bench/rollout.json                 a model of 1 million parameters
    python tools/bench/rollout.py --shape qwen3-0.6b --prompts 8 --group 4 --max-tokens 32

Weights are random. All placements stay alive and sample in turn; one warm-up round is not counted. Rows:

- bare: vLLM with its defaults: no sampling seed, plugins off, CPU kernels with packed weights
- bare, a run's options: vLLM with a run's options: one seed per prompt, for reproducibility; unpacked weights, which an
  update can reach; text decoded at the end only
- colocated, server: a run's two placements, from prompts to checked samples

`ratio_to_bare` is the median over rounds of (row's tokens per second / bare's) in one round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from record import publish
from rounds import paired_ratio

from oblr_megatron.config import Config, ParallelConfig, parse_config
from oblr_megatron.engine.handle import child_environment
from oblr_megatron.engine.protocol import EngineSpec, RolloutEngine, SamplingRequest
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.rollout import open_engines
from oblr_megatron.types import Prompt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_smoke_model import SAMPLE_TEXTS, qwen3_0_6b, random_weights, train_tokenizer

BARE = "bare"
TEMPERATURE, SEED = 1.0, 3
START_SECONDS = 600.0
TINY = {  # about the size of the demo's model; other fields are Qwen3-0.6B's
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,  # the tokenizer of the sample texts has 539 tokens
    "layer_types": ["full_attention"] * 4,
}
SHAPES = {"tiny": TINY, "qwen3-0.6b": {}}

Sampler = Callable[[], tuple[int, float]]
"""Samples the batch once; returns (tokens, seconds)."""


@dataclass(frozen=True, slots=True)
class Work:
    """The model, prompts and sizes that every placement uses.

    Example: Work(model="/tmp/m", dtype="float32", prompts=[[5, 9]], group_size=8, max_tokens=128, max_model_len=160,
                  max_num_seqs=256, kv_cache_bytes=2**29, num_threads=2)
    """

    model: str
    dtype: str
    prompts: list[list[int]]
    group_size: int
    max_tokens: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one placement.

    Example: Row(placement="colocated", shape="tiny", samples=512, tokens=65536, rounds=5, seconds=4.1,
                 tokens_per_s=16000.0, ratio_to_bare=0.98)
    """

    placement: str
    shape: str
    samples: int
    tokens: int  # per round, median
    rounds: int
    seconds: float  # median
    tokens_per_s: float  # median
    ratio_to_bare: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = make_work(directory / "model", options)
        samplers = build_samplers(work, directory, stack)
        rows = measure(samplers, work, options)
    publish(rows, "rollout", options.json)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def write_model(path: Path, shape: str) -> tuple[str, int]:
    """Write a model with random weights; returns its dtype and the number of tokens of its tokenizer."""
    tokenizer = train_tokenizer(SAMPLE_TEXTS)
    dtype = "bfloat16" if shape == "qwen3-0.6b" else "float32"
    config = qwen3_0_6b(tokenizer, dtype)
    config.update(SHAPES[shape])
    known = len(tokenizer)
    from safetensors.torch import save_file

    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_file(random_weights(config, num_tokens=known, seed=0), path / "model.safetensors", metadata={"format": "pt"})
    return dtype, known


def make_work(model: Path, options: argparse.Namespace) -> Work:
    """Write the model and draw the prompts."""
    dtype, known = write_model(model, options.shape)
    draw = random.Random(0)
    prompts = [[draw.randrange(4, known) for _ in range(draw.randint(8, 24))] for _ in range(options.prompts)]
    return Work(
        model=str(model),
        dtype=dtype,
        prompts=prompts,
        group_size=options.group,
        max_tokens=options.max_tokens,
        max_model_len=32 + options.max_tokens,
        max_num_seqs=256,
        kv_cache_bytes=2**30,
        num_threads=len(os.sched_getaffinity(0)),
    )


def build_samplers(work: Work, directory: Path, stack: ExitStack) -> dict[str, Sampler]:
    """Start all placements."""
    (directory / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")
    samplers: dict[str, Sampler] = {
        BARE: Bare(work, directory, "stock", stack),
        "bare, a run's options": Bare(work, directory, "ours", stack),
    }
    parallel = initialize(ParallelConfig())
    stack.callback(shutdown)
    url = start_server(work, directory, stack)
    for name, servers in (("colocated", []), ("server", [url])):
        engines = open_engines(run_config(work, directory / name, servers), parallel)
        stack.callback(engines.close)
        samplers[name] = partial(sample, engines, work)
    return samplers


class Bare:
    """A separate process with a bare `vllm.LLM`; a call samples one batch."""

    def __init__(self, work: Work, directory: Path, like: str, stack: ExitStack) -> None:
        environment = child_environment(os.environ, spec_of(work))
        if like == "stock":
            environment |= {"VLLM_PLUGINS": ""}
            environment.pop("VLLM_ZENTORCH_WEIGHT_PREPACK")
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rollout_bare.py")), str(directory / "work.json"), like],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context((directory / f"{like}.log").open("w")),
                env=environment,
                text=True,
            )
        )
        stack.callback(self._process.kill)
        self._wait_for("ready")

    def __call__(self) -> tuple[int, float]:
        """One batch."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        found = json.loads(self._wait_for("{"))
        return found["tokens"], found["seconds"]

    def _wait_for(self, start: str) -> str:
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("the bare engine has died")


def spec_of(work: Work) -> EngineSpec:
    """The engine spec that `child_environment` needs."""
    return EngineSpec(
        name=BARE,
        model=Path(work.model),
        dtype="bfloat16" if work.dtype == "bfloat16" else "float32",
        device="cpu",
        max_model_len=work.max_model_len,
        max_num_seqs=work.max_num_seqs,
        kv_cache_bytes=work.kv_cache_bytes,
        num_threads=work.num_threads,
    )


def run_config(work: Work, run_dir: Path, servers: Sequence[str]) -> Config:
    """Config of a run that samples this work."""
    return parse_config(
        {
            "run_dir": str(run_dir),
            "num_prompts": len(work.prompts),
            "group_size": work.group_size,
            "model": {"path": work.model, "dtype": work.dtype},
            "data": {"train": "unused", "max_prompt_tokens": 32},
            "algo": {"snr": {"num_folds": 1}},  # divides any number of prompts
            "rollout": {
                "max_response_tokens": work.max_tokens,
                "max_num_seqs": work.max_num_seqs,
                "kv_cache_gib": work.kv_cache_bytes / 2**30,
                "num_threads": work.num_threads,
                "servers": list(servers),
            },
        }
    )


def start_server(work: Work, directory: Path, stack: ExitStack) -> str:
    """Start `oblr-megatron serve` as a user does; returns its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "oblr_megatron.cli", "serve", "--model", work.model, "--port", str(port)]
    command += ["--dtype", work.dtype, "--max-model-len", str(work.max_model_len), "--die-with-parent"]
    command += ["--max-num-seqs", str(work.max_num_seqs), "--kv-cache-gib", str(work.kv_cache_bytes / 2**30)]
    command += ["--num-threads", str(work.num_threads)]
    log = stack.enter_context((directory / "server.log").open("w"))
    process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    stack.callback(process.terminate)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {(directory / 'server.log').read_text()[-2000:]}")


def sample(engines: RolloutEngine, work: Work) -> tuple[int, float]:
    """Sample one batch as a run does; returns (tokens, seconds)."""
    prompts = [
        Prompt(row=n, id=str(n), text="", token_ids=tuple(ids), answer="", source="")
        for n, ids in enumerate(work.prompts)
    ]
    start = time.perf_counter()
    request = SamplingRequest(work.group_size, TEMPERATURE, work.max_tokens, SEED)
    samples = engines.generate(prompts, request)
    return sum(len(one.response_ids) for one in samples), time.perf_counter() - start


def measure(samplers: dict[str, Sampler], work: Work, options: argparse.Namespace) -> list[Row]:
    """Measure every placement once per round, in alternating order. The first round is not counted."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in samplers}
    for number in range(options.rounds + 1):
        for name in list(samplers)[:: -1 if number % 2 else 1]:
            outcome = samplers[name]()
            if number:
                found[name].append(outcome)
    speeds = {name: [tokens / seconds for tokens, seconds in outcomes] for name, outcomes in found.items()}
    return [
        Row(
            placement=name,
            shape=options.shape,
            samples=len(work.prompts) * work.group_size,
            tokens=round(statistics.median(tokens for tokens, _ in outcomes)),
            rounds=len(outcomes),
            seconds=statistics.median(seconds for _, seconds in outcomes),
            tokens_per_s=statistics.median(speeds[name]),
            ratio_to_bare=paired_ratio(speeds[name], speeds[BARE]),
        )
        for name, outcomes in found.items()
    ]


if __name__ == "__main__":
    main()
