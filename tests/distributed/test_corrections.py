"""Rejection and centering in every mode and layout: norms, gradient and counts are the oracle's, fp64, 1e-10.

The oracle takes autograd sample by sample, with the weights written out per response. The steps are those of
test_gradnorm_modes.py. On two ranks a layout has every second option, in turn; the nightly test has all.

Not covered: the formulas' edge cases (tests/unit/algo/test_rejection.py), CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logits, oracle_logprobs, within_support
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from oblr_megatron.types import RECORDED, Sample
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import (
    GROUP,
    MODES,
    PACKED,
    PROMPTS,
    RTOL,
    config_of,
    make_samples,
    policy_of,
    relative_difference,
    scored,
)
from tests.tiny import VOCAB, make_hf_dir

ACTIVE = torch.tensor([True, True, False, True])  # the group of equal rewards has no gradient
OPTIONS: dict[str, dict[str, Any]] = {
    "icepop": {"rejection": "token", "rejection_low": 0.4, "rejection_high": 2.5, "importance_cap": 2.5},
    "masked sequences": {"rejection": "sequence", "rejection_low": 0.06, "rejection_high": 2.2},
    "masked means": {"rejection": "geometric", "rejection_low": 0.5, "rejection_high": 1.3, "importance_cap": 9.0},
    "unweighted": {"rejection": "geometric", "rejection_high": 1.8, "importance_sampling": "none"},
    "centred": {"rejection": "token", "rejection_low": 0.4, "rejection_high": 2.5, "importance_cap": 1.3},
    "centred, unweighted": {"rejection": "token", "rejection_high": 2.5, "importance_sampling": "none"},
}
RECORDED_TOKENS = 6
LAYOUTS: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    1: [({}, {})],
    2: [({}, {}), ({"tp": 2, "sp": True}, {}), ({"pp": 2}, {}), ({"cp": 2}, {}), ({"cp": 2}, PACKED)],
    8: [({"tp": 2, "sp": True, "pp": 2, "cp": 2}, PACKED)],
}
RUN_IN = ("two_pass", "stash", "bookkeep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hf_dir(tmp_path_factory.mktemp("models") / "tied", dtype=torch.float64, tied=True, seed=5))


def weights_of(logprobs: torch.Tensor, drawn: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """rho [T] of one response, from the definitions."""
    ratios = (logprobs - drawn).exp()
    total = ratios if options["rejection"] == "token" else ratios.prod()
    if options["rejection"] == "geometric" and len(ratios):
        total = total ** (1 / len(ratios))
    high = options["rejection_high"]
    inside = ((total >= options.get("rejection_low", 1 / high)) & (total <= high)).double().expand(len(ratios))
    if options.get("importance_sampling") == "none":
        return inside
    return ratios.clamp(max=options.get("importance_cap", 1.1)) * inside


@cache
def recorded_samples() -> list[Sample]:
    """The samples with recorded tokens at random; most draws are among them, and some rows are the whole support."""
    random, samples = np.random.default_rng(7), []
    for sample in make_samples():
        recorded = np.zeros((len(sample.response_ids), RECORDED_TOKENS), RECORDED)
        for row, token, logprob in zip(recorded, sample.response_ids, sample.logprobs, strict=True):
            row["id"] = random.permutation(VOCAB)[:RECORDED_TOKENS]
            row["logprob"] = np.log(random.dirichlet(np.ones(RECORDED_TOKENS)))
            if random.random() < 0.5:  # no other token could be drawn
                row["logprob"][-2:] = -np.inf
            if random.random() < 0.8 and token not in row["id"]:
                row["id"][1] = token
            row["logprob"][row["id"] == token] = logprob
        samples.append(replace(sample, recorded=recorded))
    return samples


def centred_gradient(
    weights: dict[str, torch.Tensor], hf_config: Any, sample: Sample, rho: torch.Tensor, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The centred score by Hugging Face name, and the energy at the logits, from the definition and autograd."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    logits = oracle_logits(leaves, hf_config, torch.tensor((*sample.prompt_ids, *sample.response_ids)))
    own = range(len(sample.response_ids)) if not sample.mask else np.flatnonzero(sample.mask)
    response = within_support(logits[len(sample.prompt_ids) - 1 : -1], sample)
    score, at = logits.sum() * 0, iter(rho)
    for place in own:
        row, token = sample.recorded[place], sample.response_ids[place]
        logpi = (response[place] / 0.8).log_softmax(-1)
        known = [(int(one["id"]), float(one["logprob"])) for one in row if one["logprob"] > -np.inf]
        weight = next(at)
        if token in dict(known):
            score = score + weight * logpi[token]
        for token, drawn in known:
            ratio = float((logpi[token].detach() - drawn).exp())
            if options.get("rejection_low", 1 / options["rejection_high"]) <= ratio <= options["rejection_high"]:
                kept = 1.0 if "importance_sampling" in options else min(ratio, options["importance_cap"])
                score = score - np.exp(drawn) * kept * logpi[token]
    (of_logits,) = torch.autograd.grad(score, logits, retain_graph=True)
    grads = torch.autograd.grad(score, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), of_logits.square().sum()


@cache
def expected(path: str, name: str) -> dict[str, Any]:
    """The step with an option."""
    options, centred = OPTIONS[name], "centred" in name
    hf_config = AutoConfig.from_pretrained(path)
    weights = {key: tensor.double() for key, tensor in load_file(Path(path) / "model.safetensors").items()}
    gradients, rhos, energies, mismatch = [], [], [], 0.0
    for n, sample in enumerate(recorded_samples()):
        logprobs, drawn = oracle_logprobs(weights, hf_config, sample, 0.8), torch.tensor(sample.logprobs).double()
        drawn = drawn[torch.tensor(sample.mask)] if sample.mask else drawn  # of the tokens that the policy wrote
        rhos.append(weights_of(logprobs, drawn, options))
        if centred:
            gradient, energy = centred_gradient(weights, hf_config, sample, rhos[-1], options)
            energies.append(energy)
        else:
            gradient = oracle_gradient(weights, hf_config, sample, 0.8, rhos[-1])
        gradients.append(gradient)
        mismatch += float((drawn - logprobs).sum()) if ACTIVE[n // GROUP] else 0.0
    norms = torch.stack([sum(g.square().sum() for g in grad.values()) for grad in gradients])
    norms = norms * ACTIVE.repeat_interleave(GROUP)
    config = config_of(path, {"mode": "two_pass"}, folds=4)
    coefficients = AdvantageRule(scored(), config)(range(PROMPTS), norms.view(PROMPTS, GROUP)).flatten()
    total = [-sum(c * gradient[name] for c, gradient in zip(coefficients, gradients, strict=True)) for name in weights]
    used = [rho for n, rho in enumerate(rhos) if ACTIVE[n // GROUP] and len(rho)]
    tokens = sum(len(rho) for rho in used)
    return {
        "norms": norms,
        "energies": torch.stack(energies) * ACTIVE.repeat_interleave(GROUP) if centred else None,
        "B": sum(float(gradient.square().sum()) for gradient in total),
        "rollout_rs_masked_fraction": sum(int((rho == 0).sum()) for rho in used) / tokens,
        "rollout_rs_seq_masked_fraction": sum(bool((rho == 0).any()) for rho in used) / len(used),
        "kl": mismatch / tokens,
    }


def steps(
    path: str, cases: list[tuple[dict[str, Any], dict[str, Any]]], everything: bool
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Each layout has every second option, with one of the one-pass modes, in turn; or every one with all."""
    found = {}
    for turn, (sizes, parallel_options) in enumerate(cases):
        with layout(**sizes) as parallel:
            chosen = list(OPTIONS.items()) if everything else list(OPTIONS.items())[turn % 2 :: 2]
            for place, (name, options) in enumerate(chosen):
                plain: dict[str, torch.Tensor] = {}
                for mode in RUN_IN if everything else (RUN_IN[0], RUN_IN[1 + (turn + place) % 2]):
                    config = config_of(path, MODES[mode], folds=4, **parallel_options)
                    rollout = config.rollout.model_copy(update=options)
                    algo = config.algo.model_copy(update={"center": "centred" in name})
                    config = config.model_copy(update={"rollout": rollout, "algo": algo})
                    policy = policy_of(path, parallel, config)
                    step = StepGradient(policy, config).begin(1)
                    batch = whole_step(Batch([], recorded_samples(), scored()))
                    step.add(batch, AdvantageRule(scored(), config))
                    (stats,) = step.updates()
                    gradient = {name: parameter.main_grad.clone() for name, parameter in policy.named_parameters()}
                    plain = plain or gradient
                    assert stats.rejection is not None
                    found[f"{sizes} {parallel_options}", name, mode] = {
                        "norms": step.norms_sq.flatten(),
                        "energies": step.norms(batch, ACTIVE, source="logit") if algo.center else None,
                        "B": stats.sq_norm,
                        "rejection": stats.rejection,
                        "difference": max(relative_difference(gradient[key], plain[key]) for key in plain),
                    }
    return found


@pytest.mark.parametrize(
    ("world_size", "everything"),
    [(1, True), (2, False), *(pytest.param(size, True, marks=pytest.mark.nightly) for size in (2, 8))],
)
def test_norms_gradient_and_counts_are_the_oracles(model: str, world_size: int, everything: bool) -> None:
    wanted = {name: expected(model, name) for name in OPTIONS}
    for name, want in wanted.items():
        assert 0.02 < want["rollout_rs_masked_fraction"] < 0.9, name  # some stay, some go
    for results in run_ranks(steps, world_size, model, LAYOUTS[world_size], everything):
        for case, found in results.items():
            want, rejection = wanted[case[1]], found["rejection"]
            torch.testing.assert_close(
                found["norms"], want["norms"], rtol=RTOL, atol=0, msg=lambda m, c=case: f"{c}: {m}"
            )
            if want["energies"] is not None:
                torch.testing.assert_close(found["energies"], want["energies"], rtol=1e-9, atol=1e-12)
            assert found["B"] == pytest.approx(want["B"], rel=RTOL), case
            assert found["difference"] <= RTOL, case
            assert rejection.rollout_rs_masked_fraction == pytest.approx(want["rollout_rs_masked_fraction"]) or (
                case[2] == "two_pass"  # leaves out single samples with an advantage of 0
            ), case
            if case[2] != "two_pass":
                seq = want["rollout_rs_seq_masked_fraction"]
                assert rejection.rollout_rs_seq_masked_fraction == pytest.approx(seq, rel=1e-12), case
                assert rejection.kl == pytest.approx(want["kl"], rel=1e-9), case


def test_a_response_without_weight_leaves_no_trace(model: str) -> None:
    """w = 0 and no gradient; the divisor and the others' advantages are those of the whole group."""
    norms = expected(model, "masked sequences")["norms"].view(PROMPTS, GROUP)[ACTIVE]
    lengths = scored().lengths[ACTIVE]
    assert bool(((norms == 0) & (lengths > 0)).any()) and bool((norms > 0).any())
