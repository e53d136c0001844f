"""The losses of a mixture's routers: their gradient joins the policy gradient and changes no norm, in every layout.

fp64, relative 1e-10, against the oracle with the losses written out over its routers' logits. With one sample a
microbatch the auxiliary loss is the same in every layout; with several it runs over all of them, in rows or packed.

Not covered: Transformer Engine; the effect of the losses on training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step import TrainingGradient
from oblr_megatron.gradnorm import oracle as reference
from oblr_megatron.gradnorm.oracle import oracle_logprobs, oracle_sq_norms
from oblr_megatron.model.policy import build_policy
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import Outcome, assert_outcomes, whole_gradients
from tests.distributed.test_gradient import FOLDS, GROUP, NUM_PROMPTS, coefficients, make_samples
from tests.tiny import make_moe_hf_dir

TEMPERATURE, AUX, Z = 0.7, 0.3, 0.05
ALONE = {"micro_batch_tokens": 1}  # a longer sample goes alone
Case = tuple[str, dict[str, Any], dict[str, Any], int]  # name, layout, options of parallel, folds
CASES: dict[int, list[Case]] = {
    1: [
        ("one", {}, ALONE, FOLDS),
        ("one fold", {}, ALONE, 1),
        ("full", {}, ALONE | {"recompute_granularity": "full"}, FOLDS),
        ("together in rows", {}, {"micro_batch_tokens": 999}, 1),
        ("together packed", {}, {"micro_batch_tokens": 999, "packing": "packed"}, 1),
    ],
    2: [
        ("ep2", {"ep": 2}, ALONE, FOLDS),
        ("tp2sp ep2", {"tp": 2, "sp": True, "ep": 2, "etp": 1}, ALONE, FOLDS),
        ("cp2 ep2", {"cp": 2, "ep": 2}, ALONE, FOLDS),
        ("pp2 packed", {"pp": 2}, ALONE | {"packing": "packed"}, FOLDS),
    ],
    4: [
        ("tp2sp pp2", {"tp": 2, "sp": True, "pp": 2}, ALONE, FOLDS),
        ("pp2vp2 ep2 full", {"pp": 2, "vp": 2, "ep": 2}, ALONE | {"recompute_granularity": "full"}, FOLDS),
    ],
}


def config_of(path: str, options: dict[str, Any], folds: int) -> Config:
    model = {"path": path, "dtype": "float64", "moe_z_loss_coeff": Z}
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": NUM_PROMPTS,
            "group_size": GROUP,
            "model": model | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX},
            "data": {"train": "unused"},
            "algo": {"snr": {"num_folds": folds}},
            "rollout": {"importance_sampling": "none", "temperature": TEMPERATURE},
            "gradnorm": {"mode": "two_pass"},
            "parallel": options,
        }
    )


def on_ranks(path: str, cases: Sequence[Case]) -> dict[str, tuple[Outcome, Tensor, dict[str, float]]]:
    """For each case: this rank's gradient, the norms of all samples, the routers' metrics."""
    found = {}
    for name, sizes, options, folds in cases:
        config = config_of(path, options, folds)
        with layout(**sizes) as parallel:
            policy = build_policy(AutoConfig.from_pretrained(path), config.model, parallel, config.parallel)
            load_hf_weights(policy, Path(path))
            gradients = TrainingGradient(policy, config)
            norms = gradients.norms(make_samples(), torch.ones(NUM_PROMPTS, dtype=torch.bool))
            stats = gradients.policy_gradient(make_samples(), coefficients())
            assert stats.routers is not None, name
            found[name] = (whole_gradients(policy), stats.sq_norm), norms, asdict(stats.routers)
    return found


@contextmanager
def router_logits() -> Iterator[list[Tensor]]:
    """The router logits of every layer in the oracle's passes inside, each [T, E]."""
    seen: list[Tensor] = []
    original = reference._mixture

    def mixture(hidden: Tensor, layer: Any, config: Any) -> Tensor:
        seen.append(hidden @ layer["mlp.gate.weight"].T)
        return original(hidden, layer, config)

    reference._mixture = mixture
    try:
        yield seen
    finally:
        reference._mixture = original


@lru_cache
def expected(path: str, together: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of the policy loss and the routers' losses, and the metrics; one microbatch, or one a sample."""
    config, weights = AutoConfig.from_pretrained(path), load_file(Path(path) / "model.safetensors")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    pairs = list(zip(make_samples(), coefficients().tolist(), strict=True))
    used = [(sample, value) for sample, value in pairs if value and sample.response_ids]
    loss, logits = torch.zeros((), dtype=torch.float64), []  # of each sample and layer [response tokens, E]
    for sample, value in used:
        with router_logits() as seen:
            loss = loss - value * oracle_logprobs(leaves, config, sample, TEMPERATURE).sum()
        logits.append([one[len(sample.prompt_ids) - 1 : -1] for one in seen])
    layers = [[sample[layer] for sample in logits] for layer in range(config.num_hidden_layers)]
    if together:
        layers = [[torch.cat(batches)] for batches in layers]
    tokens, top, experts = sum(map(len, layers[0])), config.num_experts_per_tok, config.num_experts
    aux, z, load = torch.zeros(()).double(), torch.zeros(()).double(), 0.0
    for batches in layers:
        counts = [scores.topk(top).indices.flatten().bincount(minlength=experts) for scores in batches]
        for scores, count in zip(batches, counts, strict=True):
            share, mean = count.double() / (len(scores) * top), scores.softmax(-1).mean(0)
            aux = aux + len(scores) / tokens * experts * (share * mean).sum()
            z = z + scores.logsumexp(-1).square().sum() / tokens
        load = max(load, float(sum(counts).max()) * experts / (tokens * top))
    (loss + AUX * aux + Z * z).backward()
    metrics = {"aux_loss": aux.item() / len(layers), "z_loss": z.item() / len(layers), "max_load": load}
    return {name: leaf.grad for name, leaf in leaves.items()}, metrics


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("moe")
    return str(make_moe_hf_dir(root, seed=7, dtype=torch.float64, num_hidden_layers=4))


@pytest.fixture(scope="module")
def norms(path: str) -> Tensor:
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    return oracle_sq_norms(weights, AutoConfig.from_pretrained(path), make_samples(), TEMPERATURE)


@pytest.mark.parametrize("world_size", CASES)
def test_router_losses_are_added_to_the_gradient_and_to_no_norm(path: str, norms: Tensor, world_size: int) -> None:
    ranks = run_ranks(on_ranks, world_size, path, CASES[world_size])
    for name in ranks[0]:
        gradient, metrics = expected(path, together="together" in name)
        assert_outcomes([rank[name][0] for rank in ranks], gradient, name)
        for _, found, said in (rank[name] for rank in ranks):
            torch.testing.assert_close(found, norms, rtol=1e-10, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert said == pytest.approx(metrics, rel=1e-10), name
