"""Make the example's data, tokenizer and small warm-started Qwen3.

    python examples/tools_cpu/prepare.py --out run/tools_cpu

Writes OUT/train.jsonl, OUT/heldout.jsonl and OUT/model. The warm start imitates episodes of mixed quality
(products.py).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from calculator import calculate
from products import EOS, Row, build_tokenizer, lines, split_rows, teacher
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from transformers.utils import logging as transformers_logging

from oblr_megatron.environments.episode import observation_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # studies/ is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny_cpu"))
from tiny_model import build_model

from studies.imitate import IGNORED, imitate, padded

NUM_HELDOUT = 128
HIDDEN, LAYERS, POSITIONS = 128, 2, 96
BATCH, LR = 64, 2e-3


def main() -> None:
    """Write the data and the warm-started model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/tools_cpu"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the initial weights and the teacher")
    parser.add_argument("--steps", type=int, default=500, help="supervised steps of the warm start")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()

    options.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_rows(NUM_HELDOUT, options.seed)
    (options.out / "train.jsonl").write_text(lines(train), encoding="utf-8")
    (options.out / "heldout.jsonl").write_text(lines(heldout), encoding="utf-8")
    print(f"wrote {len(train)} training and {len(heldout)} held-out products to {options.out}", flush=True)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden=HIDDEN, layers=LAYERS, seed=options.seed)
    model.config.max_position_embeddings = POSITIONS
    start = time.perf_counter()
    generator = random.Random(options.seed)

    def batch_of(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = generator.choices(train, k=BATCH)
        return padded([episode(tokenizer, row, generator) for row in rows], tokenizer.pad_token_id)

    imitate(model, batch_of, steps=options.steps, lr=LR, report=100)
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    size = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.perf_counter() - start
    print(f"wrote {options.out / 'model'}: Qwen3 of {size:,} parameters, warm-started in {seconds:.0f} s")


def episode(tokenizer: PreTrainedTokenizerFast, row: Row, generator: random.Random) -> tuple[list[int], list[int]]:
    """(ids, labels) of one of the teacher's episodes, as the tool loop builds them; only its turns have labels."""
    first, *answer = teacher(row, generator)
    question = [{"role": "user", "content": row.question}]
    prompt = str(
        tokenizer.apply_chat_template(
            question, tools=[get_json_schema(calculate)], tokenize=False, add_generation_prompt=True
        )
    )
    parts = [(prompt, False), (first + EOS, True)]
    if answer:
        result = [{"role": "tool", "content": answer[0]}]
        parts += [(observation_text(tokenizer, result, EOS), False), (answer[0] + EOS, True)]
    ids, labels = [], []
    for text, written in parts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        labels += found if written else [IGNORED] * len(found)
    return ids, labels


if __name__ == "__main__":
    main()
