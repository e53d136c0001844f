"""Exact per-sample gradient norms are the oracle's in every parallel layout, fp64, relative tolerance 1e-10.

Two layers, grouped-query attention, every second sample with repeated tokens, an empty response among them, lengths
that differ, padding rows in the vocabulary. Models: tied embeddings with a single KV group, and the other dense
families with two (TP 4 has more ranks than that). The scores are weighted by truncated importance ratios.
test_gradnorm_modes.py has Qwen3 with two groups.

Not covered: context and expert parallelism, packed rows, recomputation, Transformer Engine's layers, CUDA, fp8.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.gradient.ratios import RatioFn, ScoreWeights
from oblr_megatron.model.lm_head import TokenScores
from oblr_megatron.model.optimizer import grad_sq_norm
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.step import reduce_model_parallel_grads, run_schedule
from oblr_megatron.types import MicroBatch
from tests.distributed.gradnorm_cases import (
    RTOL,
    TEMPERATURE,
    batches_of,
    load_policy,
    make_samples,
    oracle,
    relative_error,
    sample_sq_grad_norms,
    token_ratios,
)
from tests.distributed.launch import layout, run_ranks
from tests.tiny import make_hf_dir

LAYOUTS = {
    1: {"one": {}},
    2: {"dp2": {}, "tp2": {"tp": 2}, "tp2sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}},
    4: {
        "tp2dp2": {"tp": 2},
        "tp2spdp2": {"tp": 2, "sp": True},
        "pp2dp2": {"pp": 2},
        "tp2pp2": {"tp": 2, "pp": 2},
        "tp2sppp2": {"tp": 2, "sp": True, "pp": 2},
        "tp4": {"tp": 4},
        "tp4sp": {"tp": 4, "sp": True},
    },
}
MODELS = {
    "tied_one_group": {"tied": True, "num_key_value_heads": 1, "seed": 2},
    "qwen2": {"family": "qwen2", "seed": 4},
    "llama": {"family": "llama", "tied": True, "seed": 5},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_hf_dir(root / name, dtype=torch.float64, **options) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("tied"), tied=True, seed=1, dtype=torch.float64)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("deep"), tied=True, seed=3, num_hidden_layers=4, dtype=torch.float64)


def norms_of_replica(path: Path, parallel: Parallel, *, pad_multiple: int = 1) -> dict[int, float]:
    """w of this replica's samples; also checks that the pass changes no weight and leaves no gradient."""
    policy = load_policy(path, parallel)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    own = list(range(len(make_samples())))[parallel.dp_rank :: parallel.dp_size]
    batches = [batches_of(make_samples(), pad_multiple=pad_multiple)[n] for n in own]
    norms = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE, ratios=token_ratios)
    assert norms.dtype == torch.float64
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name]), f"{name} was changed"
        assert not parameter.main_grad.any(), f"{name} keeps a gradient"
        assert parameter.grad is None, f"{name} keeps a gradient outside the buffer"
    return dict(zip(own, norms.tolist(), strict=True))


def all_layouts(models: dict[str, Path]) -> dict[tuple[str, str], dict[int, float]]:
    results = {}
    for name, sizes in LAYOUTS[dist.get_world_size()].items():
        with layout(**sizes) as parallel:
            for model, path in models.items():
                results[name, model] = norms_of_replica(path, parallel)
    return results


def gathered(results: list[dict[int, float]]) -> torch.Tensor:
    """[N]: the norms from all ranks; ranks of one replica must agree bit for bit."""
    said: dict[int, set[float]] = {}
    for result in results:
        for sample, norm in result.items():
            said.setdefault(sample, set()).add(norm)
    assert all(len(values) == 1 for values in said.values()), said
    return torch.tensor([said[n].pop() for n in range(len(make_samples()))], dtype=torch.float64)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_are_the_oracles(world_size: int, models: dict[str, Path]) -> None:
    results = run_ranks(all_layouts, world_size, models)
    for model, path in models.items():
        expected = oracle(path, make_samples(), ratios=True)
        assert (expected == 0).sum() == 1  # the empty response
        for name in LAYOUTS[world_size]:
            error = relative_error(gathered([rank[name, model] for rank in results]), expected)
            assert error <= RTOL, (name, model, error)


def padded_and_not(path: Path) -> list[dict[int, float]]:
    with layout(tp=2, pp=2, sp=True) as parallel:
        return [norms_of_replica(path, parallel, pad_multiple=multiple) for multiple in (1, 16)]


def test_padding_does_not_matter(tied: Path) -> None:
    for plain, padded in run_ranks(padded_and_not, 4, tied):
        torch.testing.assert_close(
            torch.tensor(list(padded.values())), torch.tensor(list(plain.values())), rtol=1e-12, atol=0
        )


def four_stages(path: Path) -> dict[int, float]:
    with layout(pp=4) as parallel:
        return norms_of_replica(path, parallel)


def test_four_stages_with_a_tied_embedding(deep: Path) -> None:
    """The middle stages belong to no embedding group."""
    error = relative_error(gathered(run_ranks(four_stages, 4, deep)), oracle(deep, make_samples(), ratios=True))
    assert error <= RTOL


LOW_PRECISION = {"float32": 5e-6, "bfloat16": 5e-2}  # seen: 3e-7 and 7e-3


def variants(path: Path) -> dict[str, torch.Tensor]:
    """Options of the pass under PP 2, the layout with the most special cases."""
    results = {}
    with layout(pp=2) as parallel:
        policy = load_policy(path, parallel)
        batches = batches_of(make_samples())
        results["plain"] = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE)
        results["bounded"] = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE, kept_bytes=5000)
        results["single"] = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE, kept_bytes=0)
        results["none"] = sample_sq_grad_norms(policy, [])
        results["broken"] = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE, ratios=broken_ratios)
        results["megatron"] = by_megatrons_reductions(policy)
        for dtype in LOW_PRECISION:
            results[dtype] = sample_sq_grad_norms(
                load_policy(path, parallel, dtype=dtype), batches, temperature=TEMPERATURE
            )
        freeze(policy)
        results["frozen"] = sample_sq_grad_norms(policy, batches, temperature=TEMPERATURE)
    return results


def _with_nan(scores: TokenScores, batch: MicroBatch) -> ScoreWeights:
    ratios = torch.ones_like(scores.logprobs.detach())
    return ScoreWeights(ratios * torch.nan if batch.sample_index.item() == 2 else ratios, None, lambda: torch.zeros(()))


broken_ratios = RatioFn(_with_nan, center=False)
"""Ratio 1, and NaN for sample 2."""


def by_megatrons_reductions(policy: Policy) -> torch.Tensor:
    """The long way: a pass for each sample, megatron-core's reductions of the whole gradient, its norm."""

    def loss_of(hidden: torch.Tensor, batch: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = torch.nn.functional.linear(hidden, policy.head.weight)
        logprobs = (logits[..., : policy.vocab_size] / TEMPERATURE).log_softmax(-1)
        return logprobs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1).masked_fill(~batch.mask, 0.0).sum(), {}

    norms = []
    for batch in batches_of(make_samples()):
        policy.zero_grad()
        run_schedule(policy, [batch], loss_of)
        reduce_model_parallel_grads(policy)
        norms.append(grad_sq_norm(policy))
    return torch.tensor(norms, dtype=torch.float64)


FROZEN = ("mlp.linear_fc1", "q_layernorm", "input_layernorm")
FROZEN_IN_HF = ("gate_proj", "up_proj", "q_norm", "input_layernorm")


def freeze(policy: Policy) -> None:
    for name, parameter in policy.named_parameters():
        if any(part in name for part in FROZEN):
            parameter.requires_grad_(False)


def test_variants_under_pipeline_parallelism(tied: Path) -> None:
    expected = oracle(tied, make_samples(), ratios=False)
    for results in run_ranks(variants, 2, tied):
        assert relative_error(results["plain"], expected) <= RTOL
        assert relative_error(results["megatron"], expected) <= RTOL
        # Several runs of the pipeline, because what is put aside would not fit: the same arithmetic on each sample.
        assert torch.equal(results["bounded"], results["plain"])
        assert torch.equal(results["single"], results["plain"])
        assert results["none"].shape == (0,)
        # A gradient that is not finite spoils its own sample and no other.
        assert results["broken"].isnan().nonzero().flatten().tolist() == [2]
        others = torch.arange(len(expected)) != 2
        assert torch.equal(results["broken"][others], results["plain"][others])
        for dtype, tolerance in LOW_PRECISION.items():
            rounded = oracle(tied, make_samples(), ratios=False, rounded_to=getattr(torch, dtype))
            assert relative_error(results[dtype], rounded) <= tolerance
        frozen = oracle(tied, make_samples(), ratios=False, frozen=FROZEN_IN_HF)
        assert relative_error(results["frozen"], frozen) <= RTOL
