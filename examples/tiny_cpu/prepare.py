"""Make the demo's data, tokenizer and small warm-started Qwen3.

    python examples/tiny_cpu/prepare.py --out run/tiny_cpu

Writes OUT/train.jsonl, OUT/heldout.jsonl and OUT/model (a Hugging Face directory). Supervised learning on answers of
mixed quality (sums.py) makes the model right about half of the time before reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accuracy import accuracy, read_rows
from sums import Row, mixed_answer, split_rows
from tiny_model import EOS, build_model, build_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # studies/ is not installed
from studies.imitate import answered, imitate, padded

NUM_HELDOUT = 256
HIDDEN, LAYERS = 128, 2
BATCH, LR = 128, 1.5e-3


def main() -> None:
    """Write the data and the warm-started model; print its accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/tiny_cpu"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the initial weights and the teacher")
    parser.add_argument("--steps", type=int, default=900, help="supervised steps of the warm start")
    parser.add_argument("--experts", type=int, default=0, help="experts per layer; 0: a dense model")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more than one brings little at this size")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()

    options.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_rows(NUM_HELDOUT, options.seed)
    write_rows(train, options.out / "train.jsonl")
    write_rows(heldout, options.out / "heldout.jsonl")
    print(f"wrote {len(train)} training and {len(heldout)} held-out sums to {options.out}", flush=True)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=HIDDEN, layers=LAYERS, seed=options.seed, experts=options.experts)
    start = time.perf_counter()
    generator = random.Random(options.seed)

    def batch_of(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return teacher_batch(tokenizer, generator.choices(train, k=BATCH), generator)

    imitate(model, batch_of, steps=options.steps, lr=LR, report=100)
    seconds = time.perf_counter() - start
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")

    rows = read_rows(options.out / "heldout.jsonl")
    sampled = accuracy(model, tokenizer, rows, samples=8, seed=options.seed)
    greedy = accuracy(model, tokenizer, rows)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {options.out / 'model'}: Qwen3 of {size:,} parameters, warm-started in {seconds:.0f} s")
    print(f"held-out accuracy: {sampled:.1%} sampled at temperature 1, {greedy:.1%} greedy")


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows), encoding="utf-8")


def teacher_batch(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], generator: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids [b, t], labels [b, t]): question, mixed answer, end token, right-padded. Only answers have labels."""
    questions = tokenizer([row.question for row in rows])["input_ids"]
    answers = tokenizer([mixed_answer(row, generator) + EOS for row in rows])["input_ids"]
    return padded([answered(*pair) for pair in zip(questions, answers, strict=True)], tokenizer.pad_token_id)


if __name__ == "__main__":
    main()
