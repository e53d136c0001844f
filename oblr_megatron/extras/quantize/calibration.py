"""Reads calibration rows and packs them into batches without padding.

A quantiser takes an activation's range from every position, masked or not, so padding would distort it. Rows are
concatenated into one sequence instead. `position_ids` restart at 0 at each row, so transformers keeps rows from
attending to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config import DataConfig

Ids = tuple[int, ...]

BATCH_TOKENS = 4096
MAX_HELD_OUT = 32  # rows
HELD_OUT_SHARE = 5  # one row in five is held out


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids of the calibration rows, and of the held-out rows for measuring the error.

    Example: Rows(calibration=[(5, 9, 2), (7, 1)], held_out=[(3, 3)], skipped=4)
    """

    calibration: list[Ids]
    held_out: list[Ids]
    skipped: int  # unusable rows of the file


def read_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase, num_samples: int) -> Rows:
    """Read up to `num_samples` + 32 usable rows, and hold out the last fifth, at most 32 rows.

    The first `num_samples` of the others calibrate. Several sources of `config.train` alternate. Rows flagged as
    overlapping a benchmark are left out, as in training.

    Raises:
        UserError: a source cannot be read, or there are fewer than two usable rows.
    """
    wanted = num_samples + MAX_HELD_OUT
    sets = [read_prompts(source, config, tokenizer, limit=wanted, training=True) for source in config.train]
    turns = (prompt for turn in zip_longest(*sets) for prompt in turn if prompt is not None)
    ids = [prompt.token_ids for prompt in islice(turns, wanted)]
    if len(ids) < 2:
        raise UserError(
            "there is only one usable row, so none is left to measure the error",
            where=config.train[0].path,
            fix="give two or more rows; a real model needs several hundred",
        )
    held_out = min(MAX_HELD_OUT, max(1, len(ids) // HELD_OUT_SHARE))
    return Rows(ids[:-held_out][:num_samples], ids[-held_out:], sum(len(prompts.skipped) for prompts in sets))


@dataclass(frozen=True, slots=True)
class CalibrationBatch:
    """Concatenated rows.

    Example for the rows (5, 9, 2) and (7, 1): input_ids [[5, 9, 2, 7, 1]], position_ids [[0, 1, 2, 0, 1]]
    """

    input_ids: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64
    num_rows: int

    def arguments(self, device: torch.device) -> dict[str, Tensor | bool]:
        """Arguments of a transformers model. With a mask or a cache it would ignore the row starts."""
        return {
            "input_ids": self.input_ids.to(device),
            "position_ids": self.position_ids.to(device),
            "use_cache": False,
        }


def pack(rows: Sequence[Ids], batch_tokens: int = BATCH_TOKENS) -> list[CalibrationBatch]:
    """Batches of at most `batch_tokens` tokens, in order; a longer row gets its own batch."""
    groups: list[list[Ids]] = []
    room = 0
    for row in rows:
        if not groups or len(row) > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(row)
        room -= len(row)
    packed = []
    for group in groups:
        ids = torch.tensor([token for row in group for token in row])
        positions = torch.cat([torch.arange(len(row)) for row in group])
        packed.append(CalibrationBatch(ids[None], positions[None], len(group)))
    return packed
