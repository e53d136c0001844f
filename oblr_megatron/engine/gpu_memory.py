"""GPU memory that the trainer and an engine take turns with, seen from the trainer's side. Not yet run on a GPU."""

from __future__ import annotations

import torch


def give_back_cached() -> None:
    """Hand what torch keeps for later back to the device: an engine that starts or wakes finds only what is free."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def describe_memory() -> str:
    """What is free on this rank's device, and what this rank holds of it, for an error message.

    Example: "3.2 of 79.1 GiB of GPU memory are free, this rank of the trainer holds 60.4"
    """
    if not torch.cuda.is_available():
        return "no GPU is visible"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    held = torch.cuda.memory_reserved() / 2**30
    return f"{free:.1f} of {total:.1f} GiB of GPU memory are free, this rank of the trainer holds {held:.1f}"
