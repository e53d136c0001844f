"""Metric names in trackers: verl's where verl logs the same quantity, else our own."""

from __future__ import annotations

from oblr_megatron.metrics.names import Record

STEP = "training/global_step"
VERL = {
    "reward/mean": "critic/score/mean",
    "response_length/truncated_fraction": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "kl/mean": "actor/kl_loss",
    "lr": "actor/lr",
    "grad_norm": "actor/grad_norm",
    "timing_s/rollout": "timing_s/gen",
    "timing_s/push": "timing_s/update_weights",
    "timing_s/evaluate": "timing_s/testing",
    "timing_s/checkpoint": "timing_s/save_checkpoint",
    "data/epoch": "training/epoch",
}
"""Name in metrics.jsonl -> verl's. Equal names (`response_length/mean`, `perf/throughput`, ...) need no line."""
EVALUATIONS = {"mean_at_k": "val-core/{set}/acc/mean@{k}"}
"""eval/<set>/NAME -> verl's. Three keep our names. In verl the greedy accuracy shares mean@1 with a single sample.
Its best@k and maj@k are means over draws of k responses with replacement."""


def tracked(record: Record, k: int) -> dict[str, float]:
    """The finite values of a record by their tracker names.

    Example: {"step": 3, "lr": 1e-6, "loss": None} -> {"training/global_step": 3, "actor/lr": 1e-6}
    """
    return {_tracked(name, k): value for name, value in record.items() if value is not None}


def _tracked(name: str, k: int) -> str:
    if name == "step":
        return STEP
    first, _, rest = name.partition("/")
    of, _, metric = rest.rpartition("/")
    if first == "eval" and metric in EVALUATIONS:
        return EVALUATIONS[metric].format(set=of, k=k)
    return VERL.get(name, name)
