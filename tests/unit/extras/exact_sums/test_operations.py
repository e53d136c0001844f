"""The exact operations: bits that depend on no batch, shape or thread, and values close to torch's.

Not covered: that trainer and engine call nothing else (tests/e2e/test_zero_mismatch.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from oblr_megatron.extras.exact_sums import checks, operations
from tests.tiny import LLAMA3_ROPE

DTYPES = [torch.float32, torch.bfloat16]
WIDTH = 100  # no multiple of a vector
WEIGHT, BIAS = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in [(37, WIDTH), (37,)])
GAIN = 1 + 0.1 * BIAS.repeat(3)[:WIDTH]
ROW_WISE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (
        lambda x: operations.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
        lambda x: functional.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    ),
    "norm": (
        lambda x: operations.rms_norm(x, GAIN.to(x.dtype), 1e-6),
        lambda x: functional.rms_norm(x, (WIDTH,), GAIN.to(x.dtype), 1e-6),
    ),
    "silu": (operations.silu, functional.silu),
    "log-softmax": (lambda x: operations.log_softmax(x.float()), lambda x: x.float().log_softmax(-1)),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads inside a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Alone, in odd slices, in another order, in a batch over two threads."""
    exact, plain = ROW_WISE[name]
    x = noise(600, WIDTH).to(dtype)
    whole = exact(x)
    for size in (1, 3, 7, 64):
        assert torch.equal(torch.cat([exact(part) for part in x[:70].split(size)]), whole[:70]), size
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(exact(x[order]), whole[order])
    threads(2)
    assert torch.equal(exact(x), whole)
    scale = plain(x).double().abs().amax(-1, keepdim=True)
    assert ((whole.double() - plain(x).double()).abs() / scale).max() < (1e-5 if dtype is torch.float32 else 1e-2)


def test_the_order_of_a_sum_does_not_matter() -> None:
    """Permuted columns give the same bits: what a split of the sum over threads or tiles would do."""
    x, weight = noise(5, 8192), noise(3, 8192, seed=1)
    order = torch.randperm(8192, generator=torch.Generator().manual_seed(2))
    assert torch.equal(operations.linear(x[:, order], weight[:, order]), operations.linear(x, weight))
    assert not torch.equal(functional.linear(x[:, order], weight[:, order]), functional.linear(x, weight))
    at, scores = torch.tensor([7, 9]), noise(2, 200_000)
    order = torch.randperm(200_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(operations.log_softmax(scores[:, order]), operations.log_softmax(scores)[:, order])
    whole = operations.log_softmax(scores)
    assert torch.equal(operations.log_softmax_at(scores, at), whole.gather(1, at[:, None])[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_token_is_that_of_the_whole_sequence(dtype: torch.dtype) -> None:
    """Each query alone against its own keys, and among padding, has the bits of the whole prompt; t < s as well."""
    t, s = 20, 300
    query, key, value = noise(2, t, 4, 32).to(dtype), noise(2, s, 2, 32, seed=1).to(dtype), noise(2, s, 2, 32, seed=2)
    value = value.to(dtype)
    found = operations.attention(query, key, value, 0.05)
    for place in range(t):
        seen = s - t + place + 1
        alone = operations.attention(query[1:, place : place + 1], key[1:, :seen], value[1:, :seen], 0.05)
        assert torch.equal(alone[0, 0], found[1, place]), place
    padded = [torch.cat([part, 100 * noise(2, 40, 2, 32).to(dtype)], 1) for part in (key, value)]
    assert torch.equal(operations.attention(query, *padded, 0.05, torch.tensor([s, s])), found)
    parts = (part.double().transpose(1, 2) for part in (query, key, value))
    mask = causal_lower_right(t, s)
    plain = functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.05, enable_gqa=True)  # type: ignore[arg-type]
    error = (found.double() - plain.transpose(1, 2)).abs().max() / plain.abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 1e-2)


def test_exp_and_log() -> None:
    x = torch.cat([-torch.logspace(-12, 2.8, 5000, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    torch.testing.assert_close(operations.exp(x), x.exp(), rtol=1e-14, atol=0)
    assert operations.exp(torch.tensor([-math.inf], dtype=torch.float64)) < 1e-300
    y = torch.logspace(-3, 5, 5000, dtype=torch.float64)
    torch.testing.assert_close(operations.log(y), y.log(), rtol=0, atol=4e-15)


@pytest.mark.parametrize("parameters", [{"rope_theta": 1e6}, LLAMA3_ROPE])
def test_rotary_table_is_that_of_transformers(parameters: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default"} | parameters
    config = LlamaConfig(head_dim=32, hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(200)[None])
    found = operations.rotary_table(200, 32, rope)
    for ours, theirs in zip(found, (cosines, sines), strict=True):
        torch.testing.assert_close(ours, theirs[0, :, :16], rtol=0, atol=3e-5)  # angles up to 200, in fp32 there


def test_limits_of_the_checks_are_those_of_the_sums() -> None:
    assert (checks.LONGEST, checks.LARGEST_VOCAB) == (operations.LONGEST, operations.LARGEST_VOCAB)
    assert 2 * operations.BITS + math.log2(operations.LONGEST) == 53
