"""The waits of the host for the device in a step's gradient, by place. A new one fails here by its name.

Each empties the queue of kernels, and the device idles until the host has filled it again. `LISTED` has all waits of a
microbatch. None depends on the number of layers.

Not covered: Transformer Engine's own waits, experts (megatron-core's dispatcher reads the number of tokens of each),
several ranks, engines, the update of the weights.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.sim_cuda.launch import run

HEAD = ("copy to the host", "oblr_megatron/model/lm_head.py __call__")  # of the mask, once a microbatch
NORMS = ("copy to the host", "oblr_megatron/algo/advantage.py __call__")  # of a group, for its weights
SEVERAL = ["parallel.micro_batch_tokens=64"]
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("plain", "inline", "stash", "bookkeep", "two_pass")},
    "tied, inline": {"mode": "inline", "tied": True},
    "several in rows, bookkeep": {"mode": "bookkeep", "options": SEVERAL},
    "packed and tied, inline": {"mode": "inline", "tied": True, "options": ["parallel.packing=packed", *SEVERAL]},
}
LISTED: dict[str, dict[tuple[str, str], int]] = {case: {HEAD: 8} for case in CASES} | {
    "stash": {HEAD: 8, NORMS: 4},
    "two_pass": {HEAD: 16},
    "several in rows, bookkeep": {HEAD: 3},
    "packed and tied, inline": {HEAD: 2},
}
"""Waits that 4 more prompts of 2 samples add: 8 microbatches, 16 in two passes, fewer with several samples in each."""


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Counter[tuple[str, str]]]]:
    """Waits of a step with 2 layers and 4 prompts, with 4 layers, and with 8 prompts, of each case."""
    done = run(["-m", "tests.sim_cuda.measure", json.dumps(CASES)])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    return {
        name: [Counter({(kind, place): count for kind, place, count in row}) for row in three]
        for name, three in rows.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_the_waits_of_a_microbatch(steps: dict[str, list[Counter[tuple[str, str]]]], case: str) -> None:
    few, deep, many = steps[case]
    print(f"{case}: {few.total()} waits of a step with 2 layers and 8 samples", *few.items(), sep="\n    ")
    assert deep == few, "a wait in the loop over layers"
    assert {place: many[place] - few[place] for place in many if many[place] != few[place]} == LISTED[case]
