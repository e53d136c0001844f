"""Gradients with a weight for each token, in every layout: those with a KL penalty.

The package's main_grad equals autograd of the printed formulas, written out here with loops over responses and tokens,
on a plain-PyTorch model of one rank: fp64, relative 1e-10. Importance ratios differ from 1, one group has equal
rewards, one response is empty.

Not covered: bf16, CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.algo.baseline import active_groups
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.reference import Reference
from oblr_megatron.norms.oracle import oracle_logits
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import Wave, whole_step
from oblr_megatron.types import MicroBatch
from tests.distributed.gradnorm_cases import drawn
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import Outcome, assert_outcomes, whole_gradients
from tests.distributed.test_gradnorm_modes import GROUP, NIGHTLY, PROMPTS, config_of, make_samples, policy_of, scored
from tests.distributed.test_gradnorm_modes import expected as of_oracle
from tests.tiny import make_hf_dir, make_moe_hf_dir

CAP, TEMPERATURE, BETA, SCALE = 1.1, 0.8, 0.3, 7.0  # the first two as in config_of
CASES: dict[str, dict[str, Any]] = {
    "k2": {"baseline": "rloo", "kl_coefficient": BETA, "kl_loss": "k2"},
    "k3": {"baseline": "optimal", "kl_coefficient": BETA, "kl_loss": "k3"},
    "k2 sample_mean": {"baseline": "rloo", "aggregation": "sample_mean", "kl_coefficient": BETA, "kl_loss": "k2"},
    "k3 token_mean": {"baseline": "optimal", "aggregation": "token_mean", "kl_coefficient": BETA},
}
PACKED = {"packing": "packed"}
Layouts = dict[str, tuple[dict[str, Any], dict[str, Any]]]
LAYOUTS: dict[int, Layouts] = {
    1: {"one": ({}, {}), "packed": ({}, PACKED)},
    2: {
        "dp2 packed": ({}, PACKED),
        "tp2": ({"tp": 2}, {}),
        "tp2sp packed": ({"tp": 2, "sp": True}, PACKED),
        "pp2": ({"pp": 2}, {}),
        "pp2vp2 packed": ({"pp": 2, "vp": 2}, PACKED),
        "cp2": ({"cp": 2}, {}),
        "cp2 packed": ({"cp": 2}, PACKED),
    },
    4: {"tp2sp pp2 packed": ({"tp": 2, "sp": True, "pp": 2}, PACKED), "cp2 dp2": ({"cp": 2}, {})},
}
EXPERTS: Layouts = {"ep2": ({"ep": 2}, {}), "tp2sp ep2 etp1": ({"tp": 2, "sp": True, "ep": 2, "etp": 1}, {})}
MUTATIONS = {
    "shifted tokens": "k3",
    "slope of the other penalty": "k3",
    "unswapped reference": "k2",
    "penalty of active groups alone": "k2",
}


def configured(path: str, algo: dict[str, Any], **parallel: Any) -> Config:
    """Norms are computed whether or not the baseline needs them."""
    table = config_of(path, {"mode": "two_pass", "always": True}, folds=4, **parallel).model_dump(exclude_unset=True)
    return parse_config(table | {"algo": {"snr": {"num_folds": 4}, "token_scale": SCALE} | algo})


def kind_of(sizes: dict[str, Any]) -> str:
    """The model of a layout: only stages need four layers."""
    return "moe" if "ep" in sizes else "deep" if "pp" in sizes else "dense"


def on_ranks(
    models: dict[str, str], layouts: Layouts, every: int, mutation: str = ""
) -> dict[tuple[str, str], tuple[Outcome, Any]]:
    """(gradients, B), (w, loss, M, kl) of every `every`-th case, the first in turn, in every layout.

    The run began at "start" and is at "now".
    """
    found = {}
    for turn, (name, (sizes, options)) in enumerate(layouts.items()):
        path, start = (models[f"{kind_of(sizes)} {when}"] for when in ("now", "start"))
        with layout(**sizes) as parallel:
            for case, algo in list(CASES.items())[turn % every :: every]:
                if not mutation or MUTATIONS[mutation] == case:
                    with mutated(mutation):
                        found[name, case] = step_of(path, start, parallel, configured(path, algo, **options))
    return found


def step_of(path: str, start: str, parallel: Any, config: Config) -> tuple[Outcome, Any]:
    policy = policy_of(start, parallel, config)
    reference = Reference(policy)
    load_hf_weights(policy, Path(path))
    weights = [parameter.detach().clone() for _, parameter in policy.named_parameters()]
    step = StepGradient(policy, config, reference).begin(1)
    step.add(whole_step(Batch([], make_samples(), scored())), AdvantageRule(scored(), config))
    (stats,) = step.updates()
    assert all(torch.equal(a, b) for a, (_, b) in zip(weights, policy.named_parameters(), strict=True))
    norms = step.norms_sq.flatten()
    return (whole_gradients(policy), stats.sq_norm), (norms, stats.loss, stats.fold_sq_norm_mean, stats.kl)


def mutated(name: str) -> Any:
    """A mistake that the comparison has to notice."""
    of_tokens = MicroBatch.of_tokens

    def one_early(batch: MicroBatch, table: Tensor) -> Tensor:
        return of_tokens(batch, table.roll(-1, dims=1))

    def k2_slope(difference: Tensor, form: str) -> Tensor:
        return difference

    if name == "penalty of active groups alone":
        return patch.object(StepGradient, "_penalty", _of_active_groups)
    return {
        "": nullcontext(),
        "shifted tokens": patch.object(MicroBatch, "of_tokens", one_early),
        "slope of the other penalty": patch("oblr_megatron.gradient.loss_fn.kl_slope", k2_slope),
        "unswapped reference": patch.object(Reference, "_swap", lambda self: None),
    }[name]


def _of_active_groups(step: StepGradient, batch: Wave, counted: Tensor, original: Any = StepGradient._penalty) -> Any:
    active = active_groups("rloo", scored().rewards).repeat_interleave(GROUP)
    return original(step, batch, counted & active)


Tables = dict[int, tuple[Tensor, Tensor]]
"""For each sample the log-probs of the vocabulary at the policy's response tokens [t, V], and these tokens [t]."""


def tables_of(path: str, weights: dict[str, Tensor]) -> Tables:
    shape, found = AutoConfig.from_pretrained(path), {}
    for n, sample in enumerate(make_samples()):
        tokens = torch.tensor((*sample.prompt_ids, *sample.response_ids))
        logits = oracle_logits(weights, shape, tokens)[len(sample.prompt_ids) - 1 : -1]
        written = torch.tensor(sample.mask or (True,) * len(sample.response_ids), dtype=torch.bool)
        response = torch.tensor(sample.response_ids, dtype=torch.int64)
        found[n] = (logits / TEMPERATURE).log_softmax(-1)[written], response[written]
    return found


def expected(
    leaves: dict[str, Tensor], tables: Tables, first: Tables, algo: dict[str, Any], norms: Tensor
) -> tuple[dict[str, Tensor], tuple[float, float, float]]:
    """The gradient by autograd of the printed loss; the loss without penalty, M, and the mean of k3."""
    policy_loss, folds, k3 = 0.0, [], []
    old = [drawn(sample) for sample in make_samples()]
    advantage = advantages_of(algo["baseline"], scored().rewards.flatten().tolist(), norms)
    divisors = divisors_of(algo)
    for q in range(PROMPTS):
        loss = torch.zeros((), dtype=torch.float64)
        for n in range(q * GROUP, (q + 1) * GROUP):
            table, response = tables[n]
            before, _ = first[n]
            for t, token in enumerate(response):
                ratio = (table[t, token] - old[n][t]).exp().clamp(max=CAP).detach()
                term = -advantage[n] * ratio * table[t, token] / divisors[n]
                policy_loss += float(term)
                d = table[t, token] - before[t, token]
                k3.append(float((-d).exp() - 1 + d))
                penalty = d**2 / 2 if algo.get("kl_loss") == "k2" else (-d).exp() - 1 + d
                loss = loss + term + BETA * penalty / divisors[n]
        grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, materialize_grads=True)
        folds.append(dict(zip(leaves, grads, strict=True)))
    total = {k: sum(fold[k] for fold in folds) for k in leaves}
    mean_norm = PROMPTS * sum(float(g.square().sum()) for fold in folds for g in fold.values())
    return total, (policy_loss, mean_norm, sum(k3) / len(k3))


@cache
def wanted_of(path: str, start: str) -> dict[str, Any]:
    """Every case's gradient and metrics, and the norms, which are those of the score without penalty in every case."""
    norms = of_oracle(path)["norms"]
    leaves = {k: v.double().requires_grad_() for k, v in load_file(Path(path) / "model.safetensors").items()}
    tables = tables_of(path, leaves)
    first = tables_of(start, {k: v.double() for k, v in load_file(Path(start) / "model.safetensors").items()})
    return {"norms": norms} | {case: expected(leaves, tables, first, algo, norms) for case, algo in CASES.items()}


def divisors_of(algo: dict[str, Any]) -> list[float]:
    lengths = [max(1, sample.length) for sample in make_samples()]
    return {
        "constant": [PROMPTS * GROUP * SCALE] * len(lengths),
        "token_mean": [float(sum(lengths))] * len(lengths),
        "sample_mean": [float(PROMPTS * GROUP * length) for length in lengths],
    }[algo.get("aggregation", "constant")]


def advantages_of(baseline: str, rewards: list[float], norms: Tensor) -> list[float]:
    """A = r - b, b the weighted mean of the others: with weights 1 (rloo) or w by the oracle (optimal)."""
    weights = [1.0] * len(rewards) if baseline == "rloo" else norms.tolist()
    found = []
    for n, reward in enumerate(rewards):
        others = [j for j in range(n // GROUP * GROUP, (n // GROUP + 1) * GROUP) if j != n]
        total = sum(weights[j] for j in others)
        found.append(reward - sum(weights[j] * rewards[j] for j in others) / total if total else 0.0)
    return found


def check(models: dict[str, str], layouts: Layouts, results: list[dict[tuple[str, str], tuple[Outcome, Any]]]) -> None:
    for name, case in results[0]:
        kind = kind_of(layouts[name][0])
        wanted = wanted_of(models[f"{kind} now"], models[f"{kind} start"])
        gradients, (loss, mean_norm, k3) = wanted[case]
        assert_outcomes([found[name, case][0] for found in results], gradients, (name, case))
        for found in results:
            norms, *metrics, kl = found[name, case][1]
            torch.testing.assert_close(norms, wanted["norms"], rtol=1e-10, atol=0)
            assert metrics == pytest.approx([loss, mean_norm], rel=1e-10), (name, case)
            assert kl == pytest.approx(k3, rel=1e-10), (name, case)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    makers: dict[str, Callable[..., Path]] = {"dense": make_hf_dir, "deep": make_hf_dir, "moe": make_moe_hf_dir}
    options: dict[str, dict[str, Any]] = {"dense": {"tied": True}, "deep": {"tied": True, "num_hidden_layers": 4}}
    return {
        f"{kind} {when}": str(make(root / kind / when, seed=seed, dtype=torch.float64, **options.get(kind, {})))
        for kind, make in makers.items()
        for when, seed in (("start", 5), ("now", 6))
    }


@NIGHTLY
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_gradients_with_a_penalty(models: dict[str, str], world_size: int, nightly: bool) -> None:
    """Each layout has every second case, in turn; the nightly test has all."""
    check(models, LAYOUTS[world_size], run_ranks(on_ranks, world_size, models, LAYOUTS[world_size], 2 - nightly))


@NIGHTLY
def test_experts_that_replicas_share(models: dict[str, str], nightly: bool) -> None:
    check(models, EXPERTS, run_ranks(on_ranks, 2, models, EXPERTS, 2 - nightly))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_sees_a_mistake(models: dict[str, str], mutation: str) -> None:
    found = run_ranks(on_ranks, 1, models, {"one": ({}, {})}, 1, mutation)
    with pytest.raises(AssertionError):
        check(models, {"one": ({}, {})}, found)
