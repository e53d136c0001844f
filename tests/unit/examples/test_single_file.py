"""examples/single_file.py against the package's formulas at 1e-12, and its exact norms against torch.func.

The two were written independently. Not covered: the package's whole step, norms, gradient and folds included, which
needs megatron (tests/distributed/test_single_file_step.py), and the example's minute-long run; a few steps replace it.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.func import functional_call, jacrev

from oblr_megatron.algo.baseline import advantages
from oblr_megatron.algo.schedule import build_schedule
from oblr_megatron.algo.snr import folds
from oblr_megatron.config import OptimizerConfig
from oblr_megatron.config.algo import AlgoConfig, SnrConfig
from oblr_megatron.types import GradientStats

FILE = Path(__file__).parents[3] / "examples" / "single_file.py"
MAX_LINES = 300


@pytest.fixture(scope="module")
def single() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("single_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def model(single):
    return single.build_model(torch.float64, seed=1)


def make_samples(single, num_prompts: int, group_size: int, stale: float = 0.0) -> list:
    """Responses of several lengths. `stale` shifts their log-probs like weights of an earlier step."""
    rng = random.Random(0)
    prompts = [
        single.encode(f"{rng.randrange(10, 100)}+{rng.randrange(1, 10 ** (1 + q % 2))}=") for q in range(num_prompts)
    ]
    samples = []
    for prompt in (p for p in prompts for _ in range(group_size)):
        length = rng.randint(1, 4)
        response = [rng.randrange(single.END + 1) for _ in range(length)]
        samples.append((prompt, response, [rng.uniform(-1, 1) * stale - 2.5 for _ in range(length)]))
    return samples


def mixed_rewards(num_prompts: int, group_size: int) -> torch.Tensor:
    """Rewards 0 and 1; the first group is all right, the second all wrong."""
    rewards = torch.rand(num_prompts, group_size, generator=torch.Generator().manual_seed(0)).round()
    rewards[0], rewards[1] = 1.0, 0.0
    return rewards.double()


def test_it_stands_alone_and_is_short():
    text = FILE.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert not any(name in line for line in imports for name in ("oblr_megatron", "megatron", "vllm"))
    assert len(text.splitlines()) <= MAX_LINES


def test_advantages_agree(single):
    random_numbers = torch.Generator().manual_seed(3)
    rewards = torch.cat((mixed_rewards(4, 5), torch.randn(4, 5, generator=random_numbers, dtype=torch.float64)))
    norms = torch.randn(8, 5, generator=random_numbers, dtype=torch.float64).exp()
    norms[2] = 0.0
    norms[3, 1:] = 0.0
    want = advantages("optimal", rewards, norms, torch.ones_like(norms))
    torch.testing.assert_close(single.advantages_of(rewards, norms), want, rtol=1e-12, atol=1e-12)


def test_learning_rates_agree(single):
    settings = single.Settings(horizon=5.0, warmup_steps=3, lr=1e-3)
    snr = SnrConfig(num_folds=4, horizon=5.0, warmup_steps=3)
    ours = build_schedule(AlgoConfig(schedule="snr", snr=snr), OptimizerConfig(lr=1e-3), num_steps=40, num_prompts=8)
    others, rng = single.LearningRate(settings), random.Random(0)
    for step in range(40):
        assert others.rate(step) == pytest.approx(ours.rate(step), rel=1e-12)
        if step % 7 == 1:
            continue  # a step without an active group
        sq_norm = rng.uniform(0.5, 2.0)
        fold_sq_norm = sq_norm * rng.uniform(1.0, 5.0)
        others.observe(sq_norm, fold_sq_norm)
        stats = GradientStats(0.0, sq_norm, fold_sq_norm, 4, 0.0, 0.0, 0.0, 1)
        ours.observe(stats)
        assert folds(stats, 8).signal == pytest.approx((4 * sq_norm - fold_sq_norm) / 3)


def test_norms_are_those_of_torch_func_gradients(single, model):
    """The oracle is one batched forward with jacrev for each row's gradient, including importance ratios."""
    samples, settings = make_samples(single, 3, 3, stale=1.0), single.Settings()

    def row_scores(parameters):
        class Bound:
            def __call__(self, input_ids):
                return functional_call(model, parameters, (), {"input_ids": input_ids, "use_cache": False})

        new, old, mask = single.response_logprobs(Bound(), samples, settings.temperature)
        ratio = (new.detach() - old).exp().clamp(max=settings.ratio_cap)
        return (ratio * new * mask).sum(-1)  # [b]

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = jacrev(row_scores)(parameters)  # each [b, *shape]
    want = sum(gradient.flatten(1).square().sum(-1) for gradient in gradients.values())
    got = single.sq_grad_norms(model, samples, settings)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert got.unique().numel() == len(samples)


def test_log_probs_do_not_depend_on_padding_or_the_batch(single, model):
    samples = make_samples(single, 3, 2)
    together, _, mask = single.response_logprobs(model, samples, 0.7)
    for row, each in enumerate(samples):
        alone, _, own = single.response_logprobs(model, [each], 0.7)
        torch.testing.assert_close(together[row][mask[row]], alone[own], rtol=1e-12, atol=1e-12)


def test_a_step_is_one_clipped_adam_step(single, model):
    samples, rewards = make_samples(single, 8, 3, stale=1.0), mixed_rewards(8, 3)
    settings = single.Settings(clip=0.1, warmup_steps=4)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), betas=settings.betas, eps=settings.eps)
    step = single.oblr_po_step(model, optimizer, single.LearningRate(settings), 0, samples, rewards, settings)
    assert step.lr == settings.lr and step.gradient.norm() > 0.1
    clipped = step.gradient * 0.1 / step.gradient.norm()
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    first_adam_step = step.lr * clipped / (clipped.abs() + settings.eps)  # both moments are bias-corrected to g, g^2
    torch.testing.assert_close(moved, first_adam_step, rtol=1e-6, atol=1e-11)


def test_a_batch_of_equal_rewards_changes_nothing(single, model):
    samples, rewards, settings = make_samples(single, 4, 2), torch.ones(4, 2), single.Settings()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learning_rate, optimizer = single.LearningRate(settings), torch.optim.Adam(model.parameters())
    step = single.oblr_po_step(model, optimizer, learning_rate, 20, samples, rewards, settings)
    assert (step.norms == 0).all() and step.lr == settings.lr and not learning_rate.fresh
    assert torch.nn.utils.parameters_to_vector(model.parameters()).detach().equal(before)


def test_sampled_log_probs_are_the_models_own(single, model):
    torch.manual_seed(0)
    samples = single.sample(model, [single.encode("12+34=")] * 16, 0.8)
    new, old, mask = single.response_logprobs(model, samples, 0.8)
    torch.testing.assert_close(new[mask], old[mask], rtol=0, atol=1e-6)  # the sampler's pass through fp32
    assert all(single.END not in response[:-1] for _, response, _ in samples)


def test_some_steps_on_one_question_raise_its_reward(single):
    """The reward is 1 if the first digit is even: from chance, about 5 in 13, to nearly always."""
    torch.manual_seed(0)
    model, settings = single.build_model(seed=2), single.Settings(num_folds=4, warmup_steps=2)
    optimizer, learning_rate = torch.optim.Adam(model.parameters()), single.LearningRate(settings)
    means = []
    for step in range(12):
        samples = single.sample(model, [single.encode("12+34=")] * 32, 1.0)
        rewards = torch.tensor([float(response[0] in (0, 2, 4, 6, 8)) for _, response, _ in samples]).view(4, 8)
        single.oblr_po_step(model, optimizer, learning_rate, step, samples, rewards, settings)
        means.append(float(rewards.mean()))
    assert means[0] < 0.6 and means[-1] > 0.8
