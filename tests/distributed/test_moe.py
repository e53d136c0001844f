"""A mixture of experts in every kind of layout: logits, gradients, a step, per-sample expert gradients, export.

fp64, relative 1e-10, against the oracle (tests/unit/norms/test_oracle_moe.py compares it with transformers). Expert
parallelism inside the data-parallel ranks, inside the tensor-parallel ranks, across both; whole and cut experts; one
expert a rank and several; weights of a token's experts that sum to 1 and that do not; context parallelism, interleaved
pipeline stages, recomputation.

Not covered: Transformer Engine's grouped experts; replicas of one block with different numbers of microbatches, which
wait for one another until the process group's deadline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import export_hf, load_hf_weights
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.config import ModelConfig, OptimizerConfig, ParallelConfig
from oblr_megatron.model.optimizer import PolicyOptimizer, grad_sq_norm
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.model.step import reduce_data_parallel_grads, reduce_model_parallel_grads, run_schedule
from oblr_megatron.model.taps import AccumulateSink, Splits
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logits
from oblr_megatron.types import MicroBatch, Sample
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.names import ModelShape, entry
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import (
    COEFFICIENTS,
    PROMPT,
    TEMPERATURE,
    assert_close,
    load_policy,
    make_batches,
    merge,
    weighted_logprob_loss,
    whole_gradients,
    whole_logits,
)
from tests.distributed.test_export import assert_same, read
from tests.tiny import make_moe_hf_dir

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"ep": 2},
        {"tp": 2, "sp": True},
        {"tp": 2, "sp": True, "ep": 2, "etp": 1},
        {"tp": 2, "sp": True, "etp": 1},  # whole experts on both tensor-parallel ranks
        {"pp": 2},
        {"cp": 2, "ep": 2},
    ],
    4: [
        {"ep": 4},  # one expert a rank
        {"tp": 2, "sp": True, "ep": 2},
        {"tp": 2, "sp": True, "ep": 4, "etp": 1},  # across tensor- and data-parallel ranks
        {"tp": 4, "sp": True, "ep": 2, "etp": 1},  # on half of a replica's ranks
        {"tp": 2, "sp": True, "cp": 2, "ep": 2, "etp": 1},
        {"pp": 2, "ep": 2},
    ],
}
RECOMPUTED: list[dict[str, Any]] = [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2, "vp": 2, "ep": 2}]
LR = 0.01


@dataclass
class Outcome:
    """The results of one rank in one layout."""

    logits: list[Tensor]  # of its replica's microbatches, on the last stage; none where sequences are cut
    # After both reductions, and where there is one replica already after the first:
    gradients: list[dict[str, Tensor]]  # of its stage and expert-parallel rank, by Hugging Face name
    sq_norms: list[float]
    products: dict[tuple[str, int], Tensor]  # (expert's tensor, sample) -> its share of the sample's gradient
    stepped: dict[str, Tensor]  # all weights after a step against the gradient


class SplitSink(AccumulateSink):
    """Keeps the expert gradients of every microbatch apart by the replica of their tokens."""

    def __init__(self, policy: Policy) -> None:
        self.parallel = policy.parallel
        self.names = {id(parameter): name for name, parameter in policy.named_parameters() if ".experts." in name}
        self.position = -1
        self.products: dict[tuple[str, int], Tensor] = {}  # (parameter, sample)

    def begin(self, position: int, chunk: int, batch: MicroBatch) -> None:
        self.position = position

    def linear(self, weight: nn.Parameter, x: Tensor, dy: Tensor, splits: Splits | None = None) -> None:
        super().linear(weight, x, dy, splits)
        if id(weight) not in self.names:
            return
        splits = splits or [(self.parallel.block_rank, len(x))]
        counts = [count for _, count in splits]
        assert sum(counts) == len(x), (splits, x.shape)
        for (source, _), own_x, own_dy in zip(splits, x.split(counts), dy.split(counts), strict=True):
            replica = self.parallel.dp_rank - self.parallel.block_rank + source
            key = self.names[id(weight)], self.position * self.parallel.dp_size + replica
            self.products[key] = self.products.get(key, 0.0) + own_dy.t() @ own_x

    def whole(self, shape: ModelShape) -> dict[tuple[str, int], Tensor]:
        """By Hugging Face name, combined over the ranks that share an expert; empty except on the first of them."""
        group, whole = parallel_state.get_expert_tensor_parallel_group(), {}
        for (name, sample), product in sorted(self.products.items(), key=lambda pair: pair[0]):
            shards = [torch.empty_like(product) for _ in range(group.size())]
            dist.all_gather(shards, product, group=group)
            if group.rank() == 0:
                whole |= {(hf, sample): tensor for hf, tensor in merge(entry(name, shape), shards, shape)}
        return whole


def logits_of(policy: Policy, batches: list[MicroBatch]) -> list[Tensor]:
    def gather(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return hidden.sum(), {"logits": whole_logits(policy, hidden)[0]}

    return [record["logits"] for record in run_schedule(policy, batches, gather, forward_only=True)]


def outcome_of(policy: Policy) -> Outcome:
    parallel = policy.parallel
    mine = make_batches()[parallel.dp_rank :: parallel.dp_size]
    logits = logits_of(policy, mine) if parallel.cp_size == 1 else []
    sink = SplitSink(policy)
    policy.zero_grad()
    run_schedule(policy, mine, weighted_logprob_loss(policy), sink=sink)
    reduce_model_parallel_grads(policy)
    gradients, sq_norms = [], []
    if parallel.dp_size == 1:
        gradients, sq_norms = [whole_gradients(policy)], [grad_sq_norm(policy)]
    reduce_data_parallel_grads(policy)
    gradients.append(whole_gradients(policy))
    sq_norms.append(grad_sq_norm(policy))
    PolicyOptimizer(policy, OptimizerConfig(name="sgd", clip_grad=0.0)).step(LR)
    stepped = {name: tensor.clone() for name, tensor in MegatronWeights(policy)}
    return Outcome(logits, gradients, sq_norms, sink.whole(ModelShape.of(policy.hf_config)), stepped)


def fits(path: Path, sizes: dict[str, Any]) -> bool:
    return AutoConfig.from_pretrained(path).num_experts % sizes.get("ep", 1) == 0


def outcomes(paths: list[Path]) -> dict[str, tuple[int, Outcome]]:
    """By "model, layout": this rank's data-parallel rank and its results."""
    results = {}
    for sizes in LAYOUTS[dist.get_world_size()]:
        with layout(**sizes) as parallel:
            for path in paths:
                if fits(path, sizes):
                    results[f"{path.name} {sizes}"] = parallel.dp_rank, outcome_of(load_policy(path, parallel))
    return results


def recomputed(path: Path) -> dict[str, tuple[int, Outcome]]:
    """The same with whole layers run again in backward: the splits must be those of the second run."""
    results, config = {}, ModelConfig.model_validate({"path": path, "dtype": "float64"})
    for sizes in RECOMPUTED:
        with layout(**sizes) as parallel:
            options = ParallelConfig(recompute_granularity="full")
            policy = build_policy(AutoConfig.from_pretrained(path), config, parallel, options)
            load_hf_weights(policy, path)
            results[f"{path.name} {sizes}"] = parallel.dp_rank, outcome_of(policy)
    return results


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    raw = {"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False}
    return [
        make_moe_hf_dir(root / "normalised"),
        make_moe_hf_dir(root / "raw", seed=1, tie_word_embeddings=True, **raw),
    ]


@dataclass
class Expected:
    """The oracle's results for one model."""

    weights: dict[str, Tensor]
    logits: list[Tensor]  # of each sample
    by_sample: list[dict[str, Tensor]]  # gradients of c_n sum_t log pi(o_t)
    gradients: dict[str, Tensor]  # their sum


def expected_of(path: Path) -> Expected:
    config = AutoConfig.from_pretrained(path)
    weights = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    tokens = [batch.input_ids[0] for batch in make_batches()]
    logits = [oracle_logits(weights, config, ids) for ids in tokens]
    by_sample = []
    for n, ids in enumerate(tokens):
        sample = Sample(n, tuple(ids[:PROMPT].tolist()), tuple(ids[PROMPT:].tolist()), (), "", "stop", 0)
        gradient = oracle_gradient(weights, config, sample, TEMPERATURE)
        by_sample.append({name: COEFFICIENTS[n] * tensor for name, tensor in gradient.items()})
    return Expected(weights, logits, by_sample, {name: sum(g[name] for g in by_sample) for name in weights})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_equals_the_reference(world_size: int, paths: list[Path]) -> None:
    ranks = run_ranks(outcomes, world_size, paths)
    assert len(ranks[0]) == sum(fits(path, sizes) for path in paths for sizes in LAYOUTS[world_size])
    assert_equal(ranks, {path.name: expected_of(path) for path in paths})


def test_layers_that_run_again_in_backward_equal_the_reference(tmp_path: Path) -> None:
    path = make_moe_hf_dir(tmp_path / "deep", num_hidden_layers=4)
    ranks = run_ranks(recomputed, 4, path)
    assert len(ranks[0]) == len(RECOMPUTED)
    assert_equal(ranks, {path.name: expected_of(path)})


def assert_equal(ranks: list[dict[str, tuple[int, Outcome]]], expected: dict[str, Expected]) -> None:
    """Everything that every rank found, in every layout."""
    for case in ranks[0]:
        reference = expected[case.split()[0]]
        found = [rank[case] for rank in ranks]
        assert_logits(case, found, reference)
        assert_gradients(case, [outcome for _, outcome in found], reference)
        assert_samples(case, [outcome for _, outcome in found], reference)
        for _, outcome in found:
            assert outcome.stepped.keys() == reference.weights.keys()
            for name, weight in reference.weights.items():
                assert_close(outcome.stepped[name], weight - LR * reference.gradients[name], (case, name))


def assert_logits(case: str, found: list[tuple[int, Outcome]], reference: Expected) -> None:
    replicas = 1 + max(dp_rank for dp_rank, _ in found)
    for dp_rank, outcome in found:
        for logits, sample in zip(outcome.logits, reference.logits[dp_rank::replicas], strict=bool(outcome.logits)):
            assert_close(logits[: len(sample)], sample, case)


def assert_gradients(case: str, found: list[Outcome], reference: Expected) -> None:
    sq_norm, seen = sum(float(gradient.square().sum()) for gradient in reference.gradients.values()), set()
    for outcome in found:
        assert outcome.sq_norms == [pytest.approx(sq_norm, rel=1e-10)] * len(outcome.gradients), case
        for name, gradient in (pair for gradients in outcome.gradients for pair in gradients.items()):
            assert_close(gradient, reference.gradients[name.removeprefix("copy of ")], (case, name))
            seen.add(name.removeprefix("copy of "))
    assert seen == reference.gradients.keys(), case


def assert_samples(case: str, found: list[Outcome], reference: Expected) -> None:
    """The products by replica, summed over the ranks that hold the same expert, are each sample's own gradient."""
    total: dict[tuple[str, int], Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for outcome in found:
        for key, product in outcome.products.items():
            total[key] = total[key] + product
    experts = [name for name in reference.gradients if ".experts." in name]
    assert total.keys() == {(name, n) for name in experts for n in range(len(reference.by_sample))}, case
    for (name, n), gradient in total.items():
        assert_close(gradient, reference.by_sample[n][name], (case, name, n))


def round_trips(sources: list[tuple[Path, str]], target: Path) -> None:
    with layout() as parallel:
        for source, dtype in sources:
            config = ModelConfig.model_validate({"path": source, "dtype": dtype})
            policy = build_policy(AutoConfig.from_pretrained(source), config, parallel)
            load_hf_weights(policy, source)
            assert all(parameter.isfinite().all() for _, parameter in policy.named_parameters())
            weights = MegatronWeights(policy)
            declared = [tuple(meta) for meta in weights.metadata()]
            assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights] == declared
            export_hf(policy, check_hf_dir(source), target / source.name, max_shard_bytes=30_000)


def test_round_trip_is_bit_equal(paths: list[Path], tmp_path: Path) -> None:
    """On one rank. test_push_pieces.py has the layouts."""
    half = make_moe_hf_dir(tmp_path / "half", dtype=torch.bfloat16, max_shard_size="20KB")
    sources = [(paths[0], "float32"), (paths[1], "float32"), (half, "bfloat16")]
    (tmp_path / "exports").mkdir()
    run_ranks(round_trips, 1, sources, tmp_path / "exports")
    for source, _ in sources:
        assert_same(read(tmp_path / "exports" / source.name), read(source))
