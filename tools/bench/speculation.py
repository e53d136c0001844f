"""Measure what `rollout.speculation` is worth: seconds of a long-tailed rollout in real vLLM, with drafts and without.

    python tools/bench/speculation.py --rounds 3 --json run/bench/speculation.json

The text repeats as often as is asked for: the model follows each token by the same next one with chance `--repeats`,
and by any other token else. So acceptance is an input here, and time is what is measured. A response ends by chance, so
lengths have a long tail, and few responses are sampled, so most steps belong to it. Every method has an engine of its
own; in each round all of them sample the same prompts with the same seeds, one after the other. The first WARM rounds
do not count: the engines measure their bounds meanwhile. Ratios are medians over rounds, to "none".
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from record import publish
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from oblr_megatron.engine.protocol import SamplingRequest  # noqa: E402
from oblr_megatron.extras.speculation.options import METHODS, SUFFIX_PACKAGE  # noqa: E402
from oblr_megatron.rollout.colocated import ColocatedEngines  # noqa: E402
from tests.e2e.tiny_rollout import engine_processes, make_prompts, start  # noqa: E402
from tests.tiny import VOCAB, make_hf_dir  # noqa: E402


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one method.

    Example: Row(method="ngram", rollout_s=9.6, cpu_s=8.9, longest=698, mean=216.0, accepted=1.7, below=7.0, same=1.0,
                 ratio=0.44, cpu_ratio=0.45)
    """

    method: str
    rollout_s: float
    cpu_s: float  # processor seconds of the engine
    longest: int  # response, tokens
    mean: float  # response, tokens
    accepted: float  # tokens of a draft
    below: float  # sequences
    same: float  # share of responses that equal those of "none"
    ratio: float
    cpu_ratio: float


@dataclass(slots=True)
class Work:
    """An engine of one method, and what it has done."""

    engines: ColocatedEngines
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    responses: list[tuple[int, ...]] = field(default_factory=list)  # of all rounds

    def roll_out(self, number: int, options: argparse.Namespace) -> None:
        """Sample a batch with seeds of its own."""
        request = SamplingRequest(options.group, 1.0, options.max_tokens, seed=number)
        prompts = make_prompts(options.prompts, seed=number)
        engine = self.engines._engine
        assert engine is not None  # a rank without an engine has none
        (process,) = [one for one in engine_processes() if one.pid == engine.pid]
        cpu, began = process.cpu_times(), time.perf_counter()
        samples = self.engines.generate(prompts, request)
        seconds, after = time.perf_counter() - began, process.cpu_times()
        if number >= options.warm:
            self.seconds.append(seconds)
            self.cpu_seconds.append(after.user + after.system - cpu.user - cpu.system)
            self.responses += [one.response_ids for one in samples]
        elif number == options.warm - 1:
            self.engines.metrics()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    methods = ["none", *(method for method in METHODS if method != "suffix" or find_spec(SUFFIX_PACKAGE))]
    limits = {"max_response_tokens": options.max_tokens, "max_num_seqs": 256, "num_threads": 1, "kv_cache_gib": 0.3}
    with tempfile.TemporaryDirectory() as name:
        model = make_hf_dir(
            Path(name) / "model",
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 128,
            head_dim=64,
            max_position_embeddings=2048,
        )
        repeat(model, options.repeats)
        found = {way: Work(start(model, Path(name) / way, speculation=way, **limits)) for way in methods}
        for number in range(options.warm + options.rounds):
            for work in found.values():
                work.roll_out(number, options)
        rows = [row_of(method, work, found["none"]) for method, work in found.items()]
        for work in found.values():
            work.engines.close()
    publish(rows, "speculation", options.json)


def row_of(method: str, work: Work, plain: Work) -> Row:
    """The result of a method; ratios are medians over rounds."""
    seen = work.engines.metrics()

    def ratio(ours: list[float], theirs: list[float]) -> float:
        return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))

    return Row(
        method,
        statistics.median(work.seconds),
        statistics.median(work.cpu_seconds),
        max(map(len, work.responses)),
        statistics.mean(map(len, work.responses)),
        seen.get("rollout/speculation_accepted", 0.0),
        seen.get("rollout/speculation_below", 0.0),
        statistics.mean(one == other for one, other in zip(work.responses, plain.responses, strict=True)),
        ratio(work.seconds, plain.seconds),
        ratio(work.cpu_seconds, plain.cpu_seconds),
    )


def repeat(model: Path, chance: float) -> None:
    """Rewrite a model: the usual token follows each one with this chance. Every product is computed as before."""
    weights = load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # the residual stream keeps the embedding of the last token
    inputs = (
        torch.nn.functional.normalize(weights["model.embed_tokens.weight"]) * len(weights["model.norm.weight"]) ** 0.5
    )
    inputs *= weights["model.norm.weight"]
    follower = torch.tensor([2 + max(0, token - 1) % (VOCAB - 2) for token in range(VOCAB)])  # never 0 or 1, the end
    wanted = math.log(chance / (1 - chance) * (VOCAB - 1)) * torch.eye(VOCAB)[follower]
    weights["lm_head.weight"] = torch.linalg.lstsq(inputs, wanted).solution.T.contiguous()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=2, help="responses per prompt")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=float, default=0.8, help="chance of the usual next token")
    parser.add_argument("--warm", type=int, default=2, help="rollouts that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
