"""Measure what `rollout.speculation` is worth: seconds of a long-tailed rollout in real vLLM, with drafts and without.

    python tools/bench/speculation.py --rounds 3 --json run/bench/speculation.json

The text repeats as often as is asked for: the model follows each token by the same next one with chance `--repeats`,
and by any other token else. So acceptance is an input here, and time is what is measured. A response ends by chance, so
lengths have a long tail, and few responses are sampled, so most steps belong to it. All methods have engines of
their own, one at a time, and draw the same samples. The first WARM rollouts do not count: the engine measures its bound
meanwhile. Each rollout has seeds of its own. `ratio` is the method's median over that of "none".
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from record import publish
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from oblr_megatron.engine.protocol import SamplingRequest  # noqa: E402
from oblr_megatron.engine.speculation import METHODS, SUFFIX_PACKAGE  # noqa: E402
from tests.e2e.tiny_rollout import make_prompts, start  # noqa: E402
from tests.tiny import VOCAB, make_hf_dir  # noqa: E402


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one method.

    Example: Row(method="ngram", rollout_s=3.1, longest=240, mean=90.0, accepted=2.1, below=7.0, same=1.0, ratio=0.61)
    """

    method: str
    rollout_s: float
    longest: int  # response, tokens
    mean: float  # response, tokens
    accepted: float  # tokens of a draft
    below: float  # sequences
    same: float  # share of responses that equal those of "none"
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    options = parse_options(arguments)
    methods = ["none", *(method for method in METHODS if method != "suffix" or find_spec(SUFFIX_PACKAGE))]
    rows: list[Row] = []
    plain: list[tuple[int, ...]] = []
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
        for method in methods:
            limits = {"max_response_tokens": options.max_tokens, "max_num_seqs": 256, "num_threads": 1}
            engines = start(model, Path(name) / method, speculation=method, kv_cache_gib=0.5, **limits)
            seconds = []
            for number in range(options.warm + options.rounds):
                request = SamplingRequest(options.group, 1.0, options.max_tokens, seed=number)
                prompts = make_prompts(options.prompts, seed=number)
                began = time.perf_counter()
                samples = engines.generate(prompts, request)
                if number >= options.warm:
                    seconds.append(time.perf_counter() - began)
                elif number == options.warm - 1:
                    engines.metrics()
            found = engines.metrics()
            engines.close()
            ids = [one.response_ids for one in samples]
            plain = plain or ids
            rows.append(
                Row(
                    method,
                    statistics.median(seconds),
                    max(map(len, ids)),
                    statistics.mean(map(len, ids)),
                    found.get("rollout/speculation_accepted", 0.0),
                    found.get("rollout/speculation_below", 0.0),
                    statistics.mean(one == other for one, other in zip(ids, plain, strict=True)),
                    statistics.median(seconds) / (rows[0].rollout_s if rows else statistics.median(seconds)),
                )
            )
    publish(rows, "speculation", options.json)


def repeat(model: Path, chance: float) -> None:
    """Rewrite a model: each token is followed by the usual one with this chance. Every product is computed as before."""
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
