"""A small checkpoint; this module imports no torch, so that a process that saves it starts fast."""

from __future__ import annotations

from pathlib import Path

from oblr_megatron.checkpoint import store
from oblr_megatron.checkpoint.store import Manifest
from oblr_megatron.checks.run_dir import CHECKPOINTS

FILES = {"common.pt": b"\x00\x01state", "__0_0.distcp": bytes(range(64)), "hf/config.json": b'{"a": 1}', "empty": b""}
STATE = {"seed": 7, "average": 0.1, "rng": [1, 2, 3], "name": "Zürich", "best": None, "nan": float("nan")}


def save(run_dir: Path, step: int, state: dict | None = None) -> Path:
    """Commit a small checkpoint."""
    target = run_dir / CHECKPOINTS / store.step_name(step)
    partial = store.begin(target)
    for name, content in FILES.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content)
    store.commit(partial, target, Manifest(step, store.measure(partial, FILES), STATE if state is None else state))
    return target
