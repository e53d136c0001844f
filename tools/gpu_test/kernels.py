"""Kernels: squares of gradient tiles, cuDNN's plans, gaps between kernels, gradients of experts."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.config import ParallelConfig, parse_config
from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.gradient.loss_fn import score_loss
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import initialize
from oblr_megatron.model.policy import build_policy
from oblr_megatron.model.precision import DTYPES
from oblr_megatron.model.published import published
from oblr_megatron.model.step import run_schedule
from oblr_megatron.norms.products import batch_sq_norms, cheaper, multiply, tiles_of
from oblr_megatron.padding import PLANNED_TOKENS, Padding
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import Sample, Scored
from tools.gpu_test.report import Report

ROUNDS = 5
ADDING = ("aten::zero_", "aten::fill_", "aten::zeros", "aten::add_", "aten::add", "aten::_foreach_add_")


def squares(
    report: Report,
    device: str = "cuda",
    dtype: str = "bfloat16",
    shapes: Sequence[tuple[int, int]] = ((1024, 3072), (4096, 12288)),
    lengths: Sequence[int] = (512, 2048, 8192),
) -> None:
    """Squared norms of dy^T x by both methods, against the product alone; what `Tiles.element_flops` should be."""
    from meter import Meter

    meter = Meter(torch.device(device))
    for d, p in shapes:
        sums = torch.empty(1, p, d, device=device)

        def alone(sums: Tensor = sums) -> Tensor:
            return torch.linalg.vector_norm(sums, dtype=torch.float64)

        report.put(f"ms of vector_norm in fp64, {p} x {d}", 1e3 * _median(meter, alone))
        copied = meter.peak(lambda call=alone: call) - meter.peak(lambda: lambda: None)
        report.put(f"bytes that vector_norm takes, over the gradient's, {p} x {d}", copied / sums.nbytes)
        for t in lengths:
            x, dy = (torch.randn(1, t, size, device=device, dtype=DTYPES[dtype]) for size in (d, p))
            _squares_of(report, meter, x, dy, sums)


def _squares_of(report: Report, meter: Any, x: Tensor, dy: Tensor, sums: Tensor) -> None:
    """One pair of factors x [1, t, d] and dy [1, t, p]; the product goes to sums [1, p, d]."""
    (_, t, d), p = x.shape, dy.shape[2]
    direct = _median(meter, lambda: batch_sq_norms(x, dy, "direct"))
    gram = _median(meter, lambda: batch_sq_norms(x, dy, "gram"))
    product = _median(meter, lambda: multiply(dy.transpose(1, 2), x, sums))
    where = f"{p} x {d}, {t} tokens"
    report.put(f"direct / product alone, {where}", direct / product)
    report.put(f"element_flops, {where}", 2 * t * (direct / product - 1))
    chosen = direct if cheaper(t, d, p, tiles_of(x)) == "direct" else gram
    report.put(f"chosen / faster method, {where}", chosen / min(direct, gram))


def _median(meter: Any, call: Callable[[], object]) -> float:
    """Median seconds, after one call that is not counted."""
    call()
    return statistics.median(meter.seconds(call) for _ in range(ROUNDS))


def plans(
    report: Report,
    shape: str = "qwen3-0.6b",
    layers: int = 2,
    dtype: str = "bfloat16",
    layers_of: str = "transformer_engine",
    count: int = 40,
    shortest: int = 1100,
) -> None:
    """What a new length costs: the first pass over `count` lengths less the second one, for each length.

    Lengths are `shortest`, + 25, + 50, ...; a multiple of 128 is raised by 1. None was met before.
    """
    from meter import Meter
    from shapes import Cell, randomize

    parallel = initialize(ParallelConfig())
    meter = Meter(parallel.device)
    cell = Cell(shape, layers, shortest + 25 * count, 2, dtype, layers_of)
    config = cell.config("rloo", {"mode": "two_pass"})
    policy = build_policy(cell.hf_config(), config.model, parallel, config.parallel)
    randomize(policy.named_parameters())
    report.put("multiple that rows are padded to", policy.padding.row)

    def seconds(lengths: Sequence[int], row: int) -> float:
        samples = [_sample(length) for length in lengths]
        padded = replace(policy, padding=Padding(row=row))
        batches = one_per_microbatch(samples, range(len(samples)))
        return meter.seconds(lambda: run_schedule(padded, batches, score_loss(padded, 1.0, None)))

    lengths = [shortest + 25 * n + (not (shortest + 25 * n) % PLANNED_TOKENS) for n in range(count)]
    seconds([shortest + 7] * 2, 1)  # compiles, allocates
    one_length = seconds([shortest + 7] * count, 1)
    first, again = seconds(lengths, 1), seconds(lengths, 1)
    report.put("ms of a microbatch, one length", 1e3 * one_length / count)
    report.put("ms of a microbatch, lengths met before", 1e3 * again / count)
    report.put("ms that a new length adds", 1e3 * (first - again) / count)
    seconds(lengths, PLANNED_TOKENS)
    new = [length + 3 for length in lengths]
    first, again = seconds(new, PLANNED_TOKENS), seconds(new, PLANNED_TOKENS)
    report.put("ms that a new length adds, rows of 128", 1e3 * (first - again) / count)


def _sample(length: int) -> Sample:
    return Sample(0, (2,) * 16, (3,) * (length - 16), (-1.0,) * (length - 16), "", "length", 0)


def gaps(
    report: Report,
    shape: str = "qwen3-0.6b",
    tokens: Sequence[int] = (300, 2048, 8192),
    layers: int = 4,
    dtype: str = "bfloat16",
    layers_of: str = "transformer_engine",
    modes: Sequence[str] = ("two_pass", "stash", "bookkeep"),
) -> None:
    """Share of a step in which kernels run; the rest are gaps, in which the host launches."""
    from meter import Meter
    from operators import busy_seconds
    from shapes import Cell
    from steps import build_candidates

    parallel = initialize(ParallelConfig())
    meter = Meter(parallel.device)
    for length in tokens:
        gc.collect()  # frees the model before: hooks and policy refer to each other
        for candidate in build_candidates(Cell(shape, layers, length, 8, dtype, layers_of), modes, parallel):
            step = candidate.make()
            seconds = _median(meter, step)
            report.put(f"ms of a step, {candidate.mode}, {length} tokens", 1e3 * seconds)
            report.put(
                f"share in kernels, {candidate.mode}, {length} tokens", busy_seconds(step, parallel.device) / seconds
            )


def experts(
    report: Report,
    sizes: dict[str, int] | None = None,
    tokens: int = 4096,
    dtype: str = "bfloat16",
    layers_of: str = "transformer_engine",
) -> None:
    """Share of a step of `bookkeep` that adds and clears gradients, for two layers of a mixture of experts."""
    from operators import operators_of
    from shapes import randomize

    cut = {"num_hidden_layers": 2, "vocab_size": 2048, **(sizes or {})}
    hf_config = Qwen3MoeConfig(**published("Qwen3-30B-A3B") | cut)
    parallel = initialize(ParallelConfig())
    with tempfile.TemporaryDirectory() as directory:
        config = parse_config(
            {
                "run_dir": directory,
                "num_prompts": 1,
                "group_size": 2,
                "model": {"path": directory, "dtype": dtype, "transformer_impl": layers_of},
                "data": {"train": "unused"},
                "algo": {"baseline": "optimal", "snr": {"num_folds": 1}},
                "rollout": {"importance_sampling": "none", "max_response_tokens": tokens},
                "gradnorm": {"mode": "bookkeep"},
            }
        )
    policy = build_policy(hf_config, config.model, parallel, config.parallel)
    randomize(policy.named_parameters())
    gradient, samples = StepGradient(policy, config), [_sample(tokens), _sample(tokens // 2)]
    scored = Scored(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[sample.length for sample in samples]]), 0)
    batch, advantage = whole_step(Batch([], samples, scored)), AdvantageRule(scored, config)

    def step() -> None:
        gradient.begin(1).add(batch, advantage)
        assert len(list(gradient.updates())) == 1

    step()  # compiles, allocates
    found = operators_of(step, parallel.device)
    report.put(
        "share that adds and clears",
        sum(one.seconds for one in found if one.name in ADDING) / sum(one.seconds for one in found),
    )
    for one in found[:8]:
        report.put(f"ms in {one.name}", 1e3 * one.seconds)
