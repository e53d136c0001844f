"""The gradient of sum_n c_n sum_t log pi(o_t), whole and under Hugging Face names, equals transformers' autograd.

fp64, relative 1e-10, in every layout: tensor, sequence, pipeline (also interleaved), context and data parallelism;
tied and untied embeddings, fewer KV groups than ranks; one sample a microbatch, several, and packed ones; activations
computed again in backward. On four ranks each layout takes one of its cases, in turn; the nightly tests take all. A
missing reduction can change a norm by as little as 2e-4, so the tolerance matters; the last test drops each reduction.

Not covered: bf16 (test_optimizer.py), experts (test_moe.py), Transformer Engine's attention, CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.step import reduce_data_parallel_grads, reduce_model_parallel_grads, run_schedule
from oblr_megatron.types import MicroBatch
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    ORDERS,
    TEMPERATURE,
    Outcome,
    assert_outcomes,
    load_policy,
    make_batches,
    packed_batches,
    reduced_gradients,
    some_batches,
    weighted_logprob_loss,
    whole_gradients,
)
from tests.oracle import load_oracle, oracle_gradients
from tests.tiny import make_hf_dir

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True, "seed": 1},
    "one_group": {"num_key_value_heads": 1, "seed": 2},
    "tied, one_group": {"tied": True, "num_key_value_heads": 1, "seed": 1},
    "deep": {"num_hidden_layers": 4},
    "deep, tied": {"tied": True, "num_hidden_layers": 4},
}
BATCHES: dict[str, Callable[[], list[MicroBatch]]] = {
    "rows of 1": make_batches,
    "rows of 2": lambda: make_batches(2),
    "packed": packed_batches,
    "1 microbatch": lambda: some_batches(1),  # the interleaved schedule takes multiples of 2 and fills up the rest
    "3 microbatches": lambda: some_batches(3),  # two replicas run 2 and 1
}
SINGLE: dict[str, Callable[[], list[MicroBatch]]] = {  # the same samples, one by one, for transformers
    "rows of 2": make_batches,
    "packed": lambda: [make_batches()[index] for order in ORDERS for index in order],
}
OPTIONS: dict[str, ParallelConfig] = {
    "no recomputation": ParallelConfig(),
    "selective": ParallelConfig(recompute_granularity="selective"),
    "modules": ParallelConfig(recompute_granularity="selective", recompute_modules=("layernorm", "mlp")),
    "uniform": ParallelConfig(recompute_granularity="full", recompute_num_layers=2),
    "block": ParallelConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
}


@dataclass(frozen=True)
class Case:
    """One gradient; names are of `MODELS`, `BATCHES` and `OPTIONS`."""

    model: str
    batches: str
    sizes: dict[str, Any] = field(default_factory=dict)
    options: str = "no recomputation"


TP2SP = {"tp": 2, "sp": True}
INTERLEAVED = {"pp": 2, "vp": 2}
PLAIN: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2}, TP2SP, {"pp": 2}, {}],
    4: [{"tp": 4}, {"tp": 4, "sp": True}, {"tp": 2, "pp": 2}, TP2SP | {"pp": 2}, {"tp": 2}, {"pp": 2}],
}


ROWS = [("untied", "rows of 1"), ("tied", "rows of 2"), ("one_group", "rows of 2")]


Layouts = list[list[Case]]
"""The cases of each layout."""


def plain(ranks: int) -> Layouts:
    return [[Case(*names, size) for names in ROWS] for size in PLAIN[ranks]]


def context(ranks: int) -> Layouts:
    sizes = {2: [{"cp": 2}], 4: [{"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2} | TP2SP, {"cp": 2, "pp": 2}, {"cp": 2}]}
    return [[Case(*names, size) for names in ROWS] for size in sizes[ranks]]


def packed(ranks: int) -> Layouts:
    sizes = {
        1: [{}],
        2: [{"tp": 2}, TP2SP, {"cp": 2}, {"pp": 2}],
        4: [{"cp": 2} | TP2SP, {"cp": 2, "pp": 2}, TP2SP | {"pp": 2}],
    }
    models = ["untied", "tied, one_group"][ranks // 4 :]
    return [[Case(model, "packed", size) for model in models] for size in sizes[ranks]]


def interleaved(ranks: int) -> Layouts:
    sizes = {2: [{}], 4: [{}, TP2SP, {"cp": 2}]}[ranks]
    names = [("deep", "rows of 1"), ("deep, tied", "1 microbatch"), ("deep, tied", "3 microbatches")]
    alone = ("deep, tied", "1 microbatch")  # two replicas need two microbatches
    return [
        [Case(*name, INTERLEAVED | size) for name in names if name != alone or size or ranks == 2] for size in sizes
    ]


def recomputed(ranks: int) -> Layouts:
    sizes = {1: [{}], 2: [TP2SP, {"pp": 2}, {"cp": 2}], 4: [TP2SP | {"pp": 2}]}[ranks]
    names = [name for name in OPTIONS if name != "no recomputation"]
    return [[Case("deep, tied", "rows of 2", size, name) for name in names] for size in sizes]


CASES: dict[int, list[Layouts]] = {
    1: [plain(1), packed(1), recomputed(1)],
    **{ranks: [make(ranks) for make in (plain, context, packed, interleaved, recomputed)] for ranks in (2, 4)},
}
"""By the number of ranks."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every model."""
    root = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        make_hf_dir(root / name, **options)
    return root


@cache
def expected(path: Path, batches: str) -> dict[str, Tensor]:
    gradients = oracle_gradients(load_oracle(path), SINGLE.get(batches, BATCHES[batches])(), COEFFICIENTS, TEMPERATURE)
    return {name: gradient.clone() for name, gradient in gradients.items()}


def gradients_of(root: Path, cases: Sequence[Case]) -> list[Outcome]:
    """One of each case; cases of one layout are neighbours, so that it is made once."""
    outcomes = []
    for sizes, group in groupby(cases, key=lambda case: case.sizes):
        with layout(**sizes) as parallel:
            for case in group:
                policy = load_policy(root / case.model, parallel, OPTIONS[case.options])
                assert len(policy.chunks) == sizes.get("vp", 1)
                outcomes.append(reduced_gradients(policy, BATCHES[case.batches]()))
    return outcomes


@pytest.mark.parametrize(
    ("ranks", "nightly"), [(1, False), (2, False), (4, False), pytest.param(4, True, marks=pytest.mark.nightly)]
)
def test_gradients_equal_transformers(ranks: int, nightly: bool, root: Path) -> None:
    in_turn = ranks == 4 and not nightly
    chosen = [
        [cases[(turn - 1) % len(cases)]] if in_turn else cases
        for layouts in CASES[ranks]
        for turn, cases in enumerate(layouts)
    ]
    cases = sorted((case for group in chosen for case in group), key=lambda case: repr(sorted(case.sizes.items())))
    for case, *outcomes in zip(cases, *run_ranks(gradients_of, ranks, root, cases), strict=True):
        assert_outcomes(outcomes, expected(root / case.model, case.batches), case)


def gradients_without(path: Path, reduction: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    with layout(**sizes) as parallel:
        policy = load_policy(path, parallel)
        run_schedule(policy, make_batches()[parallel.dp_rank :: parallel.dp_size], weighted_logprob_loss(policy))
        if reduction != "model":
            reduce_model_parallel_grads(policy)
        if reduction != "data":
            reduce_data_parallel_grads(policy)
        return whole_gradients(policy)


@pytest.mark.parametrize(
    ("reduction", "sizes", "wrong"),
    [
        ("model", {"tp": 2}, {"q_norm", "k_norm"}),
        (
            "model",
            {"tp": 2, "sp": True},
            {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "model.norm"},
        ),
        ("model", {"pp": 2}, {"embed_tokens"}),
        ("data", {}, {"embed_tokens", "norm", "proj"}),
    ],
)
def test_each_reduction_is_needed(reduction: str, sizes: dict[str, int], wrong: set[str], root: Path) -> None:
    """Without the reduction, the gradients of exactly these parameters are wrong."""
    reference = expected(root / "tied", "rows of 1")
    for rank in run_ranks(gradients_without, 2, root / "tied", reduction, sizes):
        for name, gradient in rank.items():
            wanted = reference[name.removeprefix("copy of ")]
            differs = bool((gradient - wanted).abs().max() > 1e-10 * wanted.abs().max())
            assert differs == any(part in name for part in wrong), name
