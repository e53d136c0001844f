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

HEAD = ("copy to the host", "oblr_megatron/model/lm_head.py __call__")
LISTED = {HEAD: 1}
SEVERAL = ["parallel.micro_batch_tokens=64"]
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("plain", "inline", "stash", "bookkeep", "two_pass")},
    "tied, inline": {"mode": "inline", "tied": True},
    "several in rows, bookkeep": {"mode": "bookkeep", "options": SEVERAL},
    "packed and tied, inline": {"mode": "inline", "tied": True, "options": ["parallel.packing=packed", *SEVERAL]},
}
MORE = {"two_pass": 16, "several in rows, bookkeep": 4, "packed and tied, inline": 4}
"""Microbatches that 4 more prompts add, if not one for each of their 8 samples."""


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
    added = {place: many[place] - few[place] for place in many if many[place] != few[place]}
    assert added == {place: count * MORE.get(case, 8) for place, count in LISTED.items()}
