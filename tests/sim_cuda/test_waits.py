"""The waits of the host for the device in a step's gradient, by place. A new one fails here by its name.

Each empties the queue of kernels, and the device idles until the host has filled it again. `LISTED` has all waits of a
microbatch. None depends on the number of layers.

Not covered: Transformer Engine's own waits, experts (megatron-core's dispatcher reads the number of tokens of each),
engines, the update of the weights.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.sim_cuda.launch import run

NORMS = ("copy to the host", "oblr_megatron/algo/advantage.py __call__")  # of a group, for its weights
P2P = "megatron/core/pipeline_parallel/p2p_communication.py _communicate_shapes"
SHAPES = {(kind, P2P): 8 for kind in ("copy from the host", "copy to the host", "device")}  # 3 a microbatch and stage
SEVERAL = ["parallel.micro_batch_tokens=64"]
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("plain", "inline", "stash", "bookkeep", "two_pass")},
    "tied, inline": {"mode": "inline", "tied": True},
    "several in rows, bookkeep": {"mode": "bookkeep", "options": SEVERAL},
    "packed and tied, inline": {"mode": "inline", "tied": True, "options": ["parallel.packing=packed", *SEVERAL]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{layout}, {mode}": {"mode": mode, "options": options}
    for layout, options in {
        "tensor": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
        "context": ["parallel.context_parallel_size=2"],
    }.items()
    for mode in ("inline", "stash", "bookkeep", "two_pass")
}
LAYOUTS |= {
    f"pipeline, {mode}": {"mode": mode, "options": ["parallel.pipeline_model_parallel_size=2"]}
    for mode in ("inline", "stash")
}
LISTED: dict[str, dict[tuple[str, str], int]] = {case: {} for case in (*CASES, *LAYOUTS)} | {
    **{case: {NORMS: 4} for case in ("stash", "tensor, stash", "context, stash")},
    "pipeline, inline": SHAPES,
    "pipeline, stash": {**SHAPES, ("device", P2P): 12, NORMS: 4},  # each group fills the pipeline again
}
"""Waits that 4 more prompts of 2 samples add: 8 microbatches, 16 in two passes, fewer with several samples in each."""


Steps = list[Counter[tuple[str, str]]]
"""Waits of a step with 2 layers and 4 prompts, with 4 layers, and with 8 prompts."""


def measured(cases: dict[str, dict[str, Any]], ranks: int = 1) -> dict[str, list[Steps]]:
    """The steps of each case and rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run([*(launcher if ranks > 1 else []), "-m", "tests.sim_cuda.measure", json.dumps(cases)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {
        name: [[Counter({(kind, place): n for kind, place, n in row}) for row in three] for three in of_ranks]
        for name, of_ranks in found.items()
    }


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Steps]]:
    return measured(CASES)


@pytest.fixture(scope="module")
def steps_of_two() -> dict[str, list[Steps]]:
    return measured(LAYOUTS, ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_the_waits_of_a_microbatch(steps: dict[str, list[Steps]], case: str) -> None:
    check(case, steps[case])


@pytest.mark.nightly
@pytest.mark.parametrize("case", LAYOUTS)
def test_the_waits_of_a_microbatch_of_two_ranks(steps_of_two: dict[str, list[Steps]], case: str) -> None:
    check(case, steps_of_two[case])


def check(case: str, ranks: list[Steps]) -> None:
    """The waits that more samples add are those that are listed, and more layers add none."""
    for rank, (few, deep, many) in enumerate(ranks):
        print(f"{case}, rank {rank}: {few.total()} waits of a step, 2 layers, 8 samples", *few.items(), sep="\n    ")
        assert deep == few, "a wait in the loop over layers"
        added = {place: many[place] - few[place] for place in many if many[place] != few[place]}
        assert added == LISTED[case], f"rank {rank}"
