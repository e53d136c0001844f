"""Score rows, gradients and samples of ToyPolicy against autograd on single samples, in fp64."""

import pytest
import torch

from studies.policy import END, Drawn, ToyPolicy
from studies.start import build_model
from studies.tasks import TASKS


@pytest.fixture(scope="module")
def policy() -> ToyPolicy:
    return ToyPolicy(build_model(TASKS["chain"]).double(), TASKS["chain"].characters, temperature=0.8)


@pytest.fixture(scope="module")
def samples(policy: ToyPolicy) -> list[Drawn]:
    """Prompts and responses of several lengths."""
    prompts = [policy.encode(text) for text in ("7+5+9:", "1+2+3+4+5+6:", "9+9+9+9:", "7+5+9:")]
    return policy.sample(prompts, 6, torch.Generator().manual_seed(3))


def own_gradient(policy: ToyPolicy, sample: Drawn, weights: torch.Tensor) -> torch.Tensor:
    """The gradient by autograd, from a forward pass on this sample only."""
    ids = torch.tensor([[*sample.prompt, *sample.tokens]])
    logprobs = (policy.model(input_ids=ids).logits[0, :-1] / policy.temperature).log_softmax(-1)
    at = torch.arange(len(sample.prompt) - 1, ids.shape[1] - 1)
    total = (logprobs[at, ids[0, at + 1]] * weights).sum()
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(total, policy.parameters)])


def test_score_rows(policy: ToyPolicy, samples: list[Drawn]) -> None:
    rows = policy.scores(samples)
    for row, sample in zip(rows, samples, strict=True):
        expected = own_gradient(policy, sample, torch.ones(len(sample.tokens), dtype=torch.float64))
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-12)
    assert all(parameter.grad is None for parameter in policy.parameters)


def test_weighted_rows_and_gradients(policy: ToyPolicy, samples: list[Drawn]) -> None:
    weights = torch.randn(len(samples), max(len(s.tokens) for s in samples), dtype=torch.float64)
    expected = [own_gradient(policy, s, w[: len(s.tokens)]) for s, w in zip(samples, weights, strict=True)]
    torch.testing.assert_close(policy.scores(samples, weights), torch.stack(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(policy.gradient(samples, weights), sum(expected), rtol=1e-10, atol=1e-12)
    coefficients = torch.randn(len(samples), dtype=torch.float64)
    product = coefficients @ policy.scores(samples)
    torch.testing.assert_close(policy.gradient(samples, coefficients), product, rtol=1e-9, atol=1e-11)


def test_scored_log_probs_equal_sampled_ones(policy: ToyPolicy, samples: list[Drawn]) -> None:
    """Sampling pads left with a KV cache, scoring pads right. Rotary angles are fp32, hence the tolerance."""
    found, mask = policy.logprobs(samples)
    for row, own, sample in zip(found, mask, samples, strict=True):
        torch.testing.assert_close(row[own], torch.tensor(sample.logprobs, dtype=torch.float64), rtol=0, atol=2e-6)


def test_samples_follow_the_distribution(policy: ToyPolicy) -> None:
    """First tokens of 4,000 responses, within five standard deviations."""
    prompt = policy.encode("7+5+9:")
    drawn = policy.sample([prompt] * 4000, 1, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor([sample.tokens[0] for sample in drawn]), minlength=15) / 4000
    with torch.no_grad():
        expected = (policy.model(input_ids=torch.tensor([prompt])).logits[0, -1] / policy.temperature).softmax(-1)
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_greedy_takes_the_most_likely_and_stops_at_the_end(policy: ToyPolicy) -> None:
    prompts = [policy.encode("7+5+9:"), policy.encode("1+2+3+4+5+6:")]
    first, second = policy.sample(prompts, 8, None), policy.sample(prompts[::-1], 8, None)
    assert [s.tokens for s in first] == [s.tokens for s in second[::-1]]
    for sample in first:
        assert END not in sample.tokens[:-1]
        ids = torch.tensor([[*sample.prompt, *sample.tokens]])
        with torch.no_grad():
            best = policy.model(input_ids=ids).logits[0].argmax(-1)
        assert best[len(sample.prompt) - 1 : -1].tolist() == list(sample.tokens)


def test_text_and_vectors(policy: ToyPolicy) -> None:
    assert policy.decode([*policy.encode("21=5"), END, 7]) == "21=5"
    here = policy.vector()
    policy.assign(here + 1)
    assert torch.equal(policy.vector(), here + 1)
    policy.assign(here)
    assert len(here) == policy.num_parameters == sum(p.numel() for p in policy.parameters)
