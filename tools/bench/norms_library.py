"""Measure the norms' library: norms alone, and clipped gradient sums in each mode, against a plain backward pass.

    python tools/bench/norms_library.py --clock cpu --tokens 512        # ten minutes on two cores

The layers have Qwen3's sizes, and the loss is a cross-entropy, one sample a microbatch. `plain` is forward and backward
of the same samples, and all ratios are to it. `inline` has given weights instead of clipping. `opacus_ghost` is ghost
clipping by Opacus of the same layers in PyTorch, in one batch or one by one, whichever is faster. No row has an
optimizer's step.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from meter import Meter, Step
from opacus_ghost import GhostTrainer, Rows, build_model
from record import publish
from rounds import measure
from shapes import PROMPT_TOKENS, SHAPES, Cell, randomize
from steps import GHOST, PLAIN, PLAIN_TORCH, Candidate
from torch import Tensor

from oblr_megatron.config import OptimizerConfig, ParallelConfig
from oblr_megatron.model.parallel import Parallel, initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.step import run_schedule
from oblr_megatron.norms import TokenBatch, clipped_grad_sum, per_sample_sq_grad_norms, weighted_grad_sum
from oblr_megatron.norms.api import Mode

MODES: tuple[Mode, ...] = ("two_pass", "bookkeep", "stash")
LIMIT = 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=512, help="of each sample, after a prompt of 16")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: ignore other processes' load")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    cell = Cell(options.shape, options.layers, options.tokens, options.samples)
    parallel = initialize(ParallelConfig())
    try:
        candidates = [*by_library(cell, parallel), *by_opacus(cell, parallel.device)]
        rows = measure(cell, candidates, Meter(parallel.device, options.clock), options.rounds, math.inf)
    finally:
        shutdown()
    publish(rows, "clipped gradient sums: cost of a pass", options.json)


def by_library(cell: Cell, parallel: Parallel) -> list[Candidate]:
    """A plain pass, norms alone, and clipped sums."""
    policy = build_policy(cell.hf_config(), cell.config("rloo", {}).model, parallel)
    randomize(policy.named_parameters())
    ids = Rows.of(cell.random_samples(), parallel.device).ids
    mask = torch.arange(ids.shape[1] - 1, device=ids.device)[None] >= PROMPT_TOKENS - 1
    batches = [TokenBatch(row[None, :-1], row[None, 1:], mask) for row in ids]

    def loss(hidden: Tensor, batch: TokenBatch) -> Tensor:
        return -batch.per_sample(policy.head(hidden, batch).logprobs)

    def plain() -> None:
        run_schedule(policy, batches, lambda hidden, batch: (loss(hidden, batch).sum(), {}))

    given = torch.linspace(0.5, 1.0, cell.samples, dtype=torch.float64)
    calls: dict[str, Callable[[], object]] = {
        PLAIN: plain,
        "norms alone": partial(per_sample_sq_grad_norms, policy, batches, loss),
        **{mode: partial(clipped_grad_sum, policy, batches, loss, LIMIT, mode=mode) for mode in MODES},
        "inline": partial(weighted_grad_sum, policy, batches, loss, given, mode="inline"),
    }
    return [Candidate(name, "", partial(_step, call, policy.zero_grad)) for name, call in calls.items()]


def by_opacus(cell: Cell, device: torch.device) -> list[Candidate]:
    """PyTorch's plain pass, and ghost clipping."""
    model = build_model(cell.hf_config(), torch.float32, device)
    randomize(model.named_parameters())
    trainer = GhostTrainer(model, OptimizerConfig(), 0.0)
    whole = Rows.of(cell.random_samples(), device)
    ones = torch.ones(cell.samples)

    def clips(sq_norms: Tensor) -> Tensor:
        return (LIMIT / sq_norms.sqrt()).clamp(max=1)

    return [
        Candidate(
            PLAIN_TORCH, "", partial(_step, partial(trainer.plain_gradient, whole.split(), ones), model.zero_grad)
        ),
        *(
            Candidate(GHOST, name, partial(_step, partial(trainer.ghost_gradient, rows, clips), model.zero_grad))
            for name, rows in (("one batch", [whole]), ("one by one", whole.split()))
        ),
    ]


def _step(call: Callable[[], object], clear: Callable[[], object]) -> Step:
    def step() -> None:
        call()
        clear()

    return step


if __name__ == "__main__":
    main()
