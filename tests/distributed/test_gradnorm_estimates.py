"""Estimated norms in every layout: the logit energy is autograd's, length is length; energies temper in one pass.

Not covered: how much variance an estimate costs the baseline (docs/evidence).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.norms.oracle import oracle_logits
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from tests.distributed.gradnorm_cases import drawn
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import (
    EARLIER,
    GROUP,
    PROMPTS,
    config_of,
    make_samples,
    oracle_of,
    policy_of,
    scored,
    step_of,
)
from tests.tiny import make_hf_dir, make_moe_hf_dir

LAYOUTS: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hf_dir(tmp_path_factory.mktemp("model"), tied=True, seed=5, dtype=torch.float64))


def of_sources(path: str, layouts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Norms by every source in every layout."""
    results = []
    for sizes in layouts:
        with layout(**sizes) as parallel:
            found = {
                source: step_of(path, parallel, config_of(path, {"source": source, "mode": "two_pass"}, 4))["norms"]
                for source in ("logit", "length")
            }
        results.append(found)
    return results


def energies(path: str) -> torch.Tensor:
    """||d sum rho log pi / d logits||^2 of each sample of the active groups, by autograd on the oracle's logits."""
    config = Qwen3Config.from_pretrained(path)
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    found = torch.zeros(PROMPTS * GROUP, dtype=torch.float64)
    for n, sample in enumerate(make_samples()):
        if n // GROUP == 2:
            continue
        tokens = torch.tensor((*sample.prompt_ids, *sample.response_ids))
        logits = oracle_logits(weights, config, tokens).requires_grad_()
        logprobs = (logits[:-1] / 0.8).log_softmax(-1).gather(1, tokens[1:, None])[len(sample.prompt_ids) - 1 :, 0]
        logprobs = logprobs[torch.tensor(sample.mask)] if sample.mask else logprobs
        ratios = (logprobs - drawn(sample)).exp().clamp(max=1.1).detach()
        (ratios * logprobs).sum().backward()
        found[n] = logits.grad.square().sum()
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_sources(model: str, world_size: int) -> None:
    lengths = torch.tensor([s.length for s in make_samples()]).double()
    lengths[2 * GROUP : 3 * GROUP] = 0
    by_autograd = energies(model)
    for found in (
        layouts for ranks in run_ranks(of_sources, world_size, model, LAYOUTS[world_size]) for layouts in ranks
    ):
        assert torch.equal(found["length"], lengths)
        torch.testing.assert_close(found["logit"], by_autograd, rtol=1e-10, atol=0)


LOGIT = {"source": "logit", "mode": "two_pass"}
TEMPERED = {"baseline": "rloo", "norm_power": 0.25}
VARIANTS: list[dict[str, Any]] = [{}, {"packing": "packed"}]


def tempered_steps(path: str, layouts: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor, float, float]]:
    """Norms, coefficients, squared norm of the gradient, mean over folds, in every layout, as rows and packed.

    Each step runs as many forward passes as one without norms, and is the same if its prompts come in waves.
    """
    results = []
    for sizes, options in ((sizes, options) for sizes in layouts for options in VARIANTS):
        with layout(**sizes) as parallel:
            plain = step_with(path, parallel, {"baseline": "rloo"}, options)
            *found, forwards = step_with(path, parallel, TEMPERED, options)
            assert forwards == plain[-1] > 0
            streamed = step_of(path, parallel, config_of(path, LOGIT, 4, algo=TEMPERED, **options), streamed=True)
            assert streamed["streamed"]["difference"] < 1e-10
            results.append(tuple(found))
    return results


def step_with(
    path: str, parallel: Parallel, algo: dict[str, Any], options: dict[str, Any], folds: int = 4
) -> tuple[Any, ...]:
    config = config_of(path, LOGIT, folds, algo=algo, **options)
    policy, forwards = policy_of(path, parallel, config), []
    for chunk in policy.chunks:
        chunk.register_forward_pre_hook(lambda *_: forwards.append(1))
    gradients = StepGradient(policy, config).begin(1)
    gradients.add(whole_step(Batch([], make_samples(), scored())), AdvantageRule(scored(), config, EARLIER))
    (stats,) = gradients.updates()
    return gradients.norms_sq, gradients.coefficients, stats.sq_norm, stats.fold_sq_norm_mean, len(forwards)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_energies_temper_the_gradient_in_one_pass(model: str, world_size: int) -> None:
    """The energy of a response is known before its backward: c, g and the folds are those of autograd."""
    norms = energies(model).view(PROMPTS, GROUP)
    config = config_of(model, LOGIT, 4, algo=TEMPERED)
    c = AdvantageRule(scored(), config, EARLIER)(range(PROMPTS), norms)
    gradients = oracle_of(model, False)[0]
    folds = [
        [sum(c[q, i] * gradients[q * GROUP + i][name] for i in range(GROUP)) for name in gradients[0]]
        for q in range(PROMPTS)
    ]
    total = sum(float(sum(parts).square().sum()) for parts in zip(*folds, strict=True))
    mean = PROMPTS * sum(float(part.square().sum()) for fold in folds for part in fold)
    for rank in run_ranks(tempered_steps, world_size, model, LAYOUTS[world_size]):
        for found, coefficients, sq_norm, fold_mean in rank:
            torch.testing.assert_close(found, norms, rtol=1e-10, atol=0)
            torch.testing.assert_close(coefficients, c, rtol=1e-10, atol=0)
            assert (sq_norm, fold_mean) == pytest.approx((total, mean), rel=1e-10)


POOLED = {"baseline": "pooled", "norm_power": 0.25}  # no group is left out
UNEVEN: list[dict[str, Any]] = [{"micro_batch_tokens": tokens} for tokens in (12, 24)]


def mixture_steps(path: str, sizes: dict[str, Any]) -> list[tuple[torch.Tensor, float]]:
    """Norms and squared norm of the gradient, with microbatches of several sizes."""
    with layout(**sizes) as parallel:
        steps = [step_with(path, parallel, POOLED, options, folds=2) for options in UNEVEN]
    return [(norms, sq_norm) for norms, _, sq_norm, *_ in steps]


def test_microbatches_without_samples_have_no_energy(tmp_path: Path) -> None:
    """Replicas that share experts run equally many microbatches; the empty ones leave the norms as they are."""
    path = str(make_moe_hf_dir(tmp_path / "moe", seed=7, dtype=torch.float64))
    ((one, sq_norm), *_) = run_ranks(mixture_steps, 1, path, {})[0]
    assert one[0, 0] > 0, "an empty microbatch names sample 0, so this norm must not be 0"
    for rank in run_ranks(mixture_steps, 2, path, {"ep": 2}):
        for norms, found in rank:
            torch.testing.assert_close(norms, one, rtol=1e-10, atol=0)
            assert found == pytest.approx(sq_norm, rel=1e-10)
