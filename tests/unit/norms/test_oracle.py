"""The oracle against transformers' Qwen3ForCausalLM: logits, log-probs and per-sample gradient norms.

transformers always computes RMSNorm in fp32, so that the fp64 comparisons replace it by torch.nn.RMSNorm. The stock
modules are compared in fp32. Not covered: sliding windows (no supported checkpoint uses them).
"""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblr_megatron.norms.oracle import oracle_gradient, oracle_logits, oracle_logprobs, oracle_sq_norms
from oblr_megatron.types import Sample
from tests.tiny import DENSE, tiny_config_of

LENGTHS = ((1, 1), (3, 5), (6, 2), (4, 9))
TOKENS = torch.tensor([3, 3, 7, 0, 22, 3, 1])


def config_of(*, tied, groups=2):
    return Qwen3Config(
        vocab_size=23,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        head_dim=8,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attn_implementation="sdpa",
    )


def transformers_model(config, dtype, *, seed=0):
    """A Qwen3ForCausalLM with norm weights other than one, so that a missing factor fails the test."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if dtype == torch.float64:
        replace_norms(model)
    return model


def replace_norms(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)


def weights_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sample_of(prompt, response, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, 23, (prompt + response,), generator=generator).tolist())
    return Sample(0, ids[:prompt], ids[prompt:], (0.0,) * response, "", "stop", 0)


def transformers_logprobs(model, sample, temperature):
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :, 0]


def test_logits_equal_stock_transformers_in_fp32():
    config = config_of(tied=True)
    model = transformers_model(config, torch.float32)
    ours = oracle_logits(weights_of(model), config, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(TOKENS[None]).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families_equal_transformers_in_fp64(family):
    config = tiny_config_of(family, vocab_size=23, pad_token_id=None)  # its gradient would be withheld
    torch.manual_seed(0)
    model = DENSE[family][1](config).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    replace_norms(model)
    sample = sample_of(4, 9)
    model.zero_grad()
    logprobs = transformers_logprobs(model, sample, 1.0)
    logprobs.sum().backward()
    torch.testing.assert_close(
        oracle_logprobs(weights_of(model), config, sample), logprobs.detach(), rtol=1e-12, atol=0
    )
    ours = oracle_gradient(weights_of(model), config, sample)
    assert ours.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("tied", "groups", "temperature"), [(True, 1, 1.0), (False, 2, 0.7), (True, 4, 0.7), (False, 4, 1.0)]
)
def test_logits_gradients_and_norms_equal_transformers_in_fp64(tied, groups, temperature):
    config = config_of(tied=tied, groups=groups)
    model = transformers_model(config, torch.float64)
    with torch.no_grad():
        logits = model(TOKENS[None]).logits[0]
    torch.testing.assert_close(oracle_logits(weights_of(model), config, TOKENS), logits, rtol=1e-12, atol=1e-12)
    samples = [sample_of(*lengths, seed=n) for n, lengths in enumerate(LENGTHS)]
    theirs = torch.zeros(len(samples), dtype=torch.float64)
    for n, sample in enumerate(samples):
        model.zero_grad()
        transformers_logprobs(model, sample, temperature).sum().backward()
        ours = oracle_gradient(weights_of(model), config, sample, temperature=temperature)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-11, atol=1e-12)
        theirs[n] = sum(parameter.grad.square().sum() for parameter in model.parameters())
    ours = oracle_sq_norms(weights_of(model), config, samples, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_ratios_scale_the_score_of_each_token():
    config = config_of(tied=False)
    weights = weights_of(transformers_model(config, torch.float64))
    sample = sample_of(3, 4)
    ones = oracle_sq_norms(weights, config, [sample], ratios=[torch.ones(4, dtype=torch.float64)])
    assert torch.equal(ones, oracle_sq_norms(weights, config, [sample]))
    doubled = oracle_sq_norms(weights, config, [sample], ratios=[torch.full((4,), 2.0, dtype=torch.float64)])
    torch.testing.assert_close(doubled, 4 * ones, rtol=1e-13, atol=0)
    ratio = torch.tensor([0.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    parts = [oracle_gradient(weights, config, sample, ratio=torch.eye(4, dtype=torch.float64)[t]) for t in range(4)]
    whole = oracle_gradient(weights, config, sample, ratio=ratio)
    for name, grad in whole.items():
        torch.testing.assert_close(
            grad, sum(r * part[name] for r, part in zip(ratio, parts, strict=True)), rtol=1e-11, atol=1e-14
        )


def test_an_empty_response_has_norm_zero():
    config = config_of(tied=True)
    weights = weights_of(transformers_model(config, torch.float64))
    assert oracle_sq_norms(weights, config, [sample_of(4, 0)]).tolist() == [0.0]
