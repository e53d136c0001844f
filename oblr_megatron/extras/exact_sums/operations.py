"""Operations with results that depend on no batch, thread or library: each sum is exact. Imports no vllm.

    y = linear(x, weight)            # row i of y is a function of row i of x and the weight, to the bit
    attention(query, key, value, scale)

A sum of floats depends on its order, and kernels choose the order by the shape. Here every summand is first cut to a
multiple of one power of two per row, so small that fp64 holds every partial sum exactly. Then all orders, all thread
counts and all processors give the same bits:

    x_i = n_i 2^(e - 20),  |n_i| <= 2^20,  2^e the power of two above max |x|       sum of 2^13 products < 2^53

That keeps 20 bits behind the largest number of a row; fp32 has 24 of each number. All other steps are single IEEE
operations (+, *, /, sqrt) on tensors. exp, log, sine and cosine are not exact in torch: their last bit depends on the
place in a tensor. exp and log are polynomials here, the tables of sine and cosine come from Python's `math`.

The engine (engine.py) and the trainer (trainer.py) both compute with this file alone, so that
their log-probs are equal to the bit. Backward passes differentiate the plain formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oblr_megatron.extras.exact_sums.checks import LARGEST_VOCAB, LONGEST

BITS = 20  # bits of a factor: BITS + BITS + 13 is the precision of fp64, 53
_SQUARE_BITS = 53 - 13  # bits of a summand in a sum of LONGEST
_VOCAB_BITS = 53 - 18
_QUERIES = 256  # rows of attention at a time, for memory
_LN2 = math.log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # its last 21 bits are 0, so n * _LN2_HIGH is exact for |n| < 2^21
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_MANTISSA = {torch.float32: (23, 127, torch.int32), torch.float64: (52, 1023, torch.int64)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., d] times weight [p, d] transposed, plus the bias [p], in the dtype of x; d is at most `LONGEST`."""
    assert x.shape[-1] <= LONGEST, f"a sum of {x.shape[-1]} products may not be exact"
    product = (_cut(x.float()).double() @ _cut(weight.float()).double().t()).float().to(x.dtype)
    return product if bias is None else product + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension, in the dtype of x."""
    wide = x.float().double()
    mean = _exact_sum(wide * wide, _SQUARE_BITS) / x.shape[-1]
    return (wide / (mean + eps).sqrt() * weight.double()).float().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in the dtype of x."""
    wide = x.float().double()
    small = exp(-wide.abs())
    return (wide * torch.where(wide < 0, small, 1.0) / (1.0 + small)).float().to(x.dtype)


def log_softmax(scores: Tensor) -> Tensor:
    """log of the softmax over the last dimension [..., V], fp32."""
    shifted, total = _normaliser(scores)
    return (shifted - log(total)).float()


def log_softmax_at(scores: Tensor, index: Tensor) -> Tensor:
    """`log_softmax` at one index [...] of each row, fp32, without the rest."""
    shifted, total = _normaliser(scores)
    return (shifted.gather(-1, index.unsqueeze(-1)) - log(total)).squeeze(-1).float()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Tensor | None = None) -> Tensor:
    """Causal grouped-query attention: the last query sees every key, each earlier query one key fewer.

    Args:
        query: [n, t, heads, head_dim].
        key: [n, s, groups, head_dim], s at least t and at most `LONGEST`.
        value: like the key.
        scale: of the scores.
        lengths: [n] keys of each sequence, the others are padding; s by default.

    Returns:
        Like the query.
    """
    (n, t, heads, head_dim), (s, groups) = query.shape, key.shape[1:3]
    assert s <= LONGEST, f"a sum over {s} keys may not be exact"
    ends = torch.full((n,), s) if lengths is None else lengths
    place = torch.arange(s)
    key, value = key.transpose(1, 2).float(), value.transpose(1, 2).float()  # [n, groups, s, head_dim]
    keys = _cut(key).double().transpose(2, 3)
    exponent = torch.frexp(value.abs().amax(-1)).exponent  # a token's values are cut to a power of two of their own
    values, sizes = _cut(value).double() / _power(exponent, torch.float64)[..., None], _power(exponent, torch.float64)
    parts = []
    for first in range(0, t, _QUERIES):
        rows = query[:, first : first + _QUERIES].transpose(1, 2).float()  # [n, heads, r, head_dim]
        r = rows.shape[2]
        scores = (_cut(rows).double().reshape(n, groups, -1, head_dim) @ keys).view(n, groups, -1, r, s) * scale
        seen = ends[:, None, None] - t + first + torch.arange(r)[:, None]  # [n, r, 1], the last key of each query
        hidden = (place > seen)[:, None, None]
        scores.masked_fill_(hidden, -torch.inf)
        weights = exp(scores - scores.amax(-1, keepdim=True)).masked_fill_(hidden, 0.0)
        total = _exact_sum(weights, _SQUARE_BITS)
        scaled = _cut(weights * sizes[:, :, None, None]).view(n, groups, -1, s)
        context = (scaled @ values).view(n, groups, -1, r, head_dim) / total
        parts.append(context.reshape(n, heads, r, head_dim).transpose(1, 2))
    return torch.cat(parts, 1).float().to(query.dtype)


def rotary_table(length: int, head_dim: int, parameters: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(cosines, sines), fp32 [length, head_dim / 2], of the angle at each position and frequency.

    `parameters` are `rope_parameters` of the model's configuration, of type "default" or "llama3".
    """
    frequencies = [_frequency(2 * i / head_dim, parameters) for i in range(head_dim // 2)]
    angles = [[place * frequency for frequency in frequencies] for place in range(length)]
    cosines, sines = ([[one(angle) for angle in row] for row in angles] for one in (math.cos, math.sin))
    return torch.tensor(cosines), torch.tensor(sines)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of heads [..., t, heads, head_dim] by the table's rows of their positions [t, head_dim / 2]."""
    wide = x if x.dtype == torch.float64 else x.float()  # gradients pass through here: float64 must stay
    first, second = wide.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(x.dtype)


def exp(x: Tensor) -> Tensor:
    """exp(x) of fp64 x <= 0, to 1e-14 relative; below -700 it returns exp(-700), about 1e-304."""
    x = x.clamp(min=-700.0)
    n = (x / _LN2).round_()
    rest = x - n * _LN2_HIGH
    rest = rest - n * _LN2_LOW
    series = torch.full_like(rest, 1 / math.factorial(12))
    for power in range(11, -1, -1):
        series = series.mul_(rest).add_(1 / math.factorial(power))
    return series.mul_(_power(n.to(torch.int32), torch.float64))


def log(x: Tensor) -> Tensor:
    """log(x) of positive fp64 x, to 1e-15 absolute below 2^16: 2 artanh((m - 1) / (m + 1)) + n log 2, x = m 2^n."""
    m, n = torch.frexp(x)  # m in [0.5, 1)
    low = m < math.sqrt(0.5)
    m, n = torch.where(low, m * 2, m), torch.where(low, n - 1, n).double()
    ratio = (m - 1) / (m + 1)
    square = ratio * ratio
    series = torch.zeros_like(x)
    for power in range(21, 0, -2):
        series = series * square + 1 / power
    return n * _LN2_HIGH + (n * _LN2_LOW + 2 * ratio * series)


def _normaliser(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(scores - their maximum, the sum of exp of that [..., 1]), fp64."""
    assert scores.shape[-1] <= LARGEST_VOCAB, f"a sum over {scores.shape[-1]} tokens may not be exact"
    wide = scores.double()
    shifted = wide - wide.amax(-1, keepdim=True)
    return shifted, _exact_sum(exp(shifted), _VOCAB_BITS)


def _exact_sum(x: Tensor, bits: int) -> Tensor:
    """Sum over the last dimension [..., 1] of fp64 numbers, cut to `bits`; exact for 2^(53 - bits) of them."""
    return _cut(x, bits).sum(-1, keepdim=True)


def _cut(x: Tensor, bits: int = BITS) -> Tensor:
    """x, fp32 or fp64, rounded to multiples of 2^(e - bits), 2^e the power of two above the largest |x| of its row."""
    digits = _MANTISSA[x.dtype][0]
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
    anchor = 1.5 * _power(exponent + (digits - bits), x.dtype)  # its last bit is the one to round to
    return (x + anchor) - anchor


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, written as bits: `torch.ldexp` multiplies by a power that it does not compute exactly."""
    digits, bias, kind = _MANTISSA[dtype]
    return ((exponent.to(kind) + bias).clamp(1, 2 * bias) << digits).view(dtype)


def _frequency(fraction: float, parameters: Mapping[str, Any]) -> float:
    """theta^-fraction; under "llama3" long waves are divided by `factor`, and those between are blended."""
    plain = float(parameters["rope_theta"]) ** -fraction
    if parameters.get("rope_type", "default") == "default":
        return plain
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - share) * plain / parameters["factor"] + share * plain
