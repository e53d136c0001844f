"""The toy trainer's gradient against examples/single_file.py and autograd on the literal loss, in fp64.

tests/distributed compares single_file's step with megatron-core's, so that all three implement the same algorithm.
"""

import importlib.util
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.config.algo import AlgoConfig
from studies.estimator import Batch, Estimator, energies
from studies.policy import Drawn, ToyPolicy
from studies.rivals import Otb
from studies.token_baseline import otb

FILE = Path(__file__).parents[3] / "examples" / "single_file.py"
Q, G = 4, 3
ROUNDED = 1e-6  # the example keeps old log-probs in fp32, so its importance ratios are 1 to seven digits


@pytest.fixture(scope="module")
def single() -> Iterator[ModuleType]:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("single_file_of_the_study", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def policy(single: ModuleType) -> ToyPolicy:
    return ToyPolicy(single.build_model(torch.float64, seed=1), single.CHARACTERS)


@pytest.fixture(scope="module")
def batch(policy: ToyPolicy) -> Batch:
    """Responses of several lengths with the policy's own log-probs; the last group has equal rewards."""
    generator = random.Random(0)
    samples = []
    for n in range(Q * G):
        prompt = tuple(generator.randrange(12) for _ in range(3 + n // G))
        samples.append(Drawn(prompt, tuple(generator.randrange(13) for _ in range(generator.randint(1, 4))), ()))
    found, mask = policy.logprobs(samples)
    own = [tuple(row[kept].tolist()) for row, kept in zip(found.detach(), mask, strict=True)]
    samples = [Drawn(each.prompt, each.tokens, logprobs) for each, logprobs in zip(samples, own, strict=True)]
    rewards = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0.25, 1, 0], [1, 1, 1]], dtype=torch.float64)
    return Batch(samples, rewards)


def test_equals_the_single_file_example(single: ModuleType, policy: ToyPolicy, batch: Batch) -> None:
    settings = single.Settings(num_prompts=Q, group_size=G, num_folds=2)
    samples = [(list(each.prompt), list(each.tokens), list(each.logprobs)) for each in batch.samples]
    norms = single.sq_grad_norms(policy.model, samples, settings).view(Q, G)
    advantages = single.advantages_of(batch.rewards, norms)
    folds = single.fold_gradients(policy.model, samples, advantages, settings)
    algo = AlgoConfig(baseline="optimal", snr={"num_folds": 2})
    found = Estimator(policy, algo, token_scale=single.MAX_RESPONSE)(batch)
    torch.testing.assert_close(found.norms_sq, norms, rtol=ROUNDED, atol=0)
    torch.testing.assert_close(found.gradient, folds.mean(0), rtol=ROUNDED, atol=1e-7)
    assert found.stats.sq_norm == pytest.approx(float(folds.mean(0).square().sum()), rel=ROUNDED)
    assert found.stats.fold_sq_norm_mean == pytest.approx(float(folds.square().sum(-1).mean()), rel=ROUNDED)


def literal(policy: ToyPolicy, batch: Batch, advantages: torch.Tensor, reference: ToyPolicy | None, beta: float):
    """-grad of the loss: sum over all tokens, divided by Q G."""
    logprobs, mask = policy.logprobs(batch.samples)
    total = (advantages * logprobs).sum()
    if reference is not None:
        difference = logprobs - reference.logprobs(batch.samples)[0].detach()
        total = total - beta * ((-difference).expm1() + difference)[mask].sum()
    gradient = torch.autograd.grad(total / (Q * G), policy.parameters)
    return torch.cat([each.flatten() for each in gradient])


def test_token_wise_baseline(policy: ToyPolicy, batch: Batch) -> None:
    logits, tokens, _ = policy.logits(batch.samples)
    values = otb(batch.rewards, energies(logits.detach(), tokens), batch.lengths)
    found = Estimator(policy, AlgoConfig(baseline="none", snr={"num_folds": 2}), rival=Otb(0, 0))(batch)
    torch.testing.assert_close(found.gradient, literal(policy, batch, values, None, 0.0), rtol=1e-9, atol=1e-12)
    assert math.isnan(found.stats.sample_sq_norm)


def test_baselines_read_the_chosen_source_of_norms_and_statistics_the_exact_ones(
    policy: ToyPolicy, batch: Batch
) -> None:
    logits, tokens, mask = policy.logits(batch.samples)
    by_logit = (energies(logits.detach(), tokens) * mask).sum(-1).view(Q, G)
    algo = AlgoConfig(baseline="optimal", snr={"num_folds": 2})
    exact = Estimator(policy, algo)(batch)
    assert exact.weights.equal(exact.norms_sq)
    for source, want in (("logit", by_logit), ("length", batch.lengths.double())):
        found = Estimator(policy, algo, source=source)(batch)
        torch.testing.assert_close(found.weights, want, rtol=1e-12, atol=0)
        assert found.norms_sq.equal(exact.norms_sq)
        values = advantages("optimal", batch.rewards, want, batch.lengths).flatten()[:, None]
        torch.testing.assert_close(found.gradient, literal(policy, batch, values, None, 0.0), rtol=1e-9, atol=1e-12)
        squares = (values[:, 0] / (Q * G)).square() @ exact.norms_sq.flatten()
        assert found.stats.sample_sq_norm == pytest.approx(float(squares), rel=1e-9)


def test_kl_penalty(single: ModuleType, policy: ToyPolicy, batch: Batch) -> None:
    """k3 against another model. The norms w remain those of the score without the penalty."""
    reference = ToyPolicy(single.build_model(torch.float64, seed=2), single.CHARACTERS)
    plain = Estimator(policy, AlgoConfig(baseline="rloo", snr={"num_folds": 2}))(batch)
    found = Estimator(
        policy, AlgoConfig(baseline="rloo", kl_coefficient=0.3, kl_loss="k3", snr={"num_folds": 2}), reference
    )(batch)
    others = (batch.rewards.sum(1, keepdim=True) - batch.rewards) / (G - 1)
    values = (batch.rewards - others).flatten()[:, None]
    torch.testing.assert_close(found.gradient, literal(policy, batch, values, reference, 0.3), rtol=1e-9, atol=1e-12)
    assert torch.equal(found.norms_sq, plain.norms_sq) and not torch.allclose(found.gradient, plain.gradient)


def test_momentum_is_the_average_of_the_gradients_before(policy: ToyPolicy, batch: Batch) -> None:
    """On a repeated batch the average is the gradient itself, so the dot product is the squared norm."""
    options = AlgoConfig(baseline="rloo", snr={"num_folds": 2, "estimator": "momentum"})
    estimator = Estimator(policy, options)
    first, second, third = (estimator(batch).stats for _ in range(3))
    assert math.isnan(first.momentum_dot)
    assert second.momentum_dot == pytest.approx(first.sq_norm, rel=1e-12)
    assert third.momentum_dot == pytest.approx(first.sq_norm, rel=1e-12)


def test_estimator_prompts_makes_every_prompt_a_fold(policy: ToyPolicy, batch: Batch) -> None:
    found = Estimator(policy, AlgoConfig(baseline="rloo", snr={"estimator": "prompts"}))(batch)
    assert found.stats.num_folds == Q
