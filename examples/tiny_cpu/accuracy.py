"""Measure held-out accuracy of a Hugging Face model with transformers' `generate`, without code of the package.

prepare.py uses it for the warm start and check_export.py for the export.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 6  # three digits and the end token, with room for longer answers


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    *,
    samples: int = 0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 512,
) -> float:
    """Share of right responses: one greedy response per row, or `samples` responses per row at temperature 1."""
    tokenizer.padding_side = "left"  # all responses begin in the same column
    torch.manual_seed(seed)
    repeated = [row for row in rows for _ in range(max(samples, 1))]
    right = 0
    for start in range(0, len(repeated), batch_size):
        batch = repeated[start : start + batch_size]
        inputs = tokenizer([row["question"] for row in batch], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=samples > 0,
            temperature=1.0 if samples else None,
            top_k=0 if samples else None,
            top_p=1.0 if samples else None,
            max_new_tokens=max_new_tokens,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text == row["answer"] for text, row in zip(texts, batch, strict=True))
    return right / len(repeated)
