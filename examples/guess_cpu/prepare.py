"""Make the game's rows, tokenizer and small warm-started Qwen3.

    python examples/guess_cpu/prepare.py --out run/guess_cpu

Writes OUT/train.jsonl, OUT/numbers.jsonl and OUT/model. The warm start imitates a player that follows the hints in half
of its guesses, and otherwise takes any number.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from game import GUESSES
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny_cpu"))
from tiny_model import build_model

NUMBERS = range(1, 16)
SHARE_CONSISTENT = 0.5
HIDDEN, LAYERS = 64, 2
BATCH, LR = 128, 2e-3
IGNORED = -100


def main() -> None:
    """Write the rows and the warm-started model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/guess_cpu"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the player")
    parser.add_argument("--steps", type=int, default=300, help="supervised steps of the warm start")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()

    options.out.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"number-{number}", "question": "?", "answer": str(number)} for number in NUMBERS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (options.out / "numbers.jsonl").write_text(text, encoding="utf-8")
    (options.out / "train.jsonl").write_text(text * 4, encoding="utf-8")

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=HIDDEN, layers=LAYERS, seed=options.seed)
    start = time.perf_counter()
    warm_start(model, tokenizer, steps=options.steps, seed=options.seed)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    size = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.perf_counter() - start
    print(f"wrote {options.out / 'model'}: Qwen3 of {size:,} parameters, warm-started in {seconds:.0f} s")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: the numbers, the hints, and the question."""
    words = ["<pad>", "<eos>", "<unk>", "?", "higher", "lower", *map(str, NUMBERS)]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> None:
    """Supervised learning on the player's guesses."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    model.train()
    for _ in range(steps):
        words = [player(generator) for _ in range(BATCH)]  # all of one length
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(game) for game in words])
        labels = ids.clone()
        labels[:, 0::2] = IGNORED  # the question and the hints
        logits = model(input_ids=ids).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def player(generator: random.Random) -> list[str]:
    """A game of four guesses, as words; it goes on after a right guess. Example: ? 3 higher 9 lower 6 lower 4"""
    secret, low, high, words = generator.choice(NUMBERS), NUMBERS[0], NUMBERS[-1], ["?"]
    for number in range(GUESSES):
        follows = generator.random() < SHARE_CONSISTENT and low <= high
        guess = generator.randint(low, high) if follows else generator.choice(NUMBERS)
        words.append(str(guess))
        if number < GUESSES - 1:
            words.append("higher" if guess < secret else "lower")
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return words


if __name__ == "__main__":
    main()
