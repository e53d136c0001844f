"""Supervised learning on a teacher's answers: the warm start of the studies and of the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

IGNORED = -100  # label of a token that is not learned


def imitate(
    model: PreTrainedModel, batch_of: Callable[[int], tuple[Tensor, Tensor]], *, steps: int, lr: float, report: int = 0
) -> None:
    """Learn a new batch in each step. The rate warms up over a tenth of the steps and then decays linearly.

    Args:
        model: trained in place.
        batch_of: the step, counted from 0 -> (ids [b, t], labels [b, t]).
        steps: optimizer steps.
        lr: the largest rate.
        report: print the loss every so many steps; 0: never.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
        ids, labels = batch_of(step)
        logits = model(input_ids=ids).logits[:, :-1]  # [b, t - 1, V]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if report and (step + 1) % report == 0:
            print(f"warm start {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


def answered(question: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[int]]:
    """(ids, labels) of a question and its answer; only the answer has labels."""
    return [*question, *answer], [IGNORED] * len(question) + [*answer]


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """(ids [b, t], labels [b, t]) of rows (ids, labels), padded on the right."""
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [pad] * (width - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)
