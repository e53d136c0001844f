"""In place of Transformer Engine's C++ module: what its layers in bf16 and fp32 call, in torch operations.

Transformer Engine's own Python runs on it. The names and arguments are those of 2.12. Other functions raise when they
are called; other enumerations are made of names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

DType = IntEnum(
    "DType",
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
    start=0,
)
TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
GEMMS = " ".join(f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT"))
FP8FwdTensors = IntEnum("FP8FwdTensors", GEMMS, start=0)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", " ".join(f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")), start=0
)
NVTE_Fused_Attn_Backend = IntEnum(
    "NVTE_Fused_Attn_Backend",
    "NVTE_No_Backend NVTE_F16_max512_seqlen NVTE_F16_arbitrary_seqlen NVTE_FP8",
    start=-1,
)


class _Names(type):
    """An enum; each value equals its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class CommOverlapHelper: ...


class CommOverlap: ...


class CommOverlapP2P: ...


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return globals().setdefault(name, _Names(name, (), {}))

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in")

    return absent


def get_cublasLt_version() -> int:
    return 130100


def get_cudnn_version() -> int:
    return 92000


def get_num_cublas_streams() -> int:
    return 4


def get_stream_priority_range() -> tuple[int, int]:
    return 0, -5


def ubuf_built_with_mpi() -> bool:
    return False


def get_fused_attn_backend(*_: Any) -> Any:
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def _on_gpu(*values: Any) -> None:
    assert all(value.is_cuda for value in values if isinstance(value, Tensor) and value.numel()), "not on the GPU"


# ---- products: column-major, so that B comes first -------------------------------------------------------------------


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    left, right = (b.t() if transb else b), (a.t() if transa else a)
    return left @ right if a.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any,
    bias: Tensor | None, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor, workspace_size: int,
    accumulate: bool, split: bool, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(product, gradient of the bias, input of gelu, further output)"""
    _on_gpu(a, b, out, bias, workspace)
    assert quantizer is None and not gelu and options.get("comm_overlap") is None
    found, bias_grad = _product(a, transa, b, transb), None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        found = found + bias
    if out is None:
        dtype = a.dtype if out_dtype is None else TORCH[out_dtype]
        out = found.to(dtype).view(found.shape if transb else (*b.shape[:-1], found.shape[-1]))
    elif accumulate:
        out.add_(found.view(out.shape))
    else:
        out.copy_(found.view(out.shape))
    return out, bias_grad, None, options.get("extra_output")


def te_general_grouped_gemm(
    a: Sequence[Tensor], transa: bool, b: Sequence[Tensor], transb: bool, out: Sequence[Tensor], out_dtype: Any,
    m_splits: Any, bias: Sequence[Tensor], bias_dtype: Any, single_output: bool, gelu_in: Any, grad: bool,
    workspaces: Any, workspace_size: int, accumulate: bool, split: bool, sm_count: int,
) -> Any:  # fmt: skip
    """One product for each expert; their rows follow each other in a single output."""
    _on_gpu(*a, *b, *out)
    start = 0
    for index, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
        found = _product(own_a, transa, own_b, transb)
        target = out[index] if not single_output else out[0].view(-1, out[0].shape[-1])[start : start + len(found)]
        start += len(found)
        target.add_(found.view(target.shape)) if accumulate else target.copy_(found.view(target.shape))
        if bias and bias[index].numel() and not grad:
            target.add_(bias[index])
    return bias


# ---- norms and rotary embedding --------------------------------------------------------------------------------------


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, otype: Any, sm_margin: int, zero: bool
) -> tuple[Any, ...]:
    """(normed x [n, h], None, 1 / root mean square [n])"""
    _on_gpu(x, weight)
    assert x.dim() == 2 and x.is_contiguous() and quantizer is None
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    found = (x.float() * rstd[:, None] * (weight.float() + zero)).to(TORCH[otype])
    return (found if out is None else out.copy_(found)), None, rstd


def rmsnorm_bwd(dz: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, sm_margin: int, zero: bool) -> tuple[Tensor, ...]:
    """(dx, dweight)"""
    _on_gpu(dz, x, rstd, weight)
    x_hat, wide = x.float() * rstd[:, None], dz.float() * (weight.float() + zero)
    dx = (wide - x_hat * (wide * x_hat).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dz.float() * x_hat).sum(0).to(weight.dtype)


layernorm_fwd, layernorm_bwd = __getattr__("layernorm_fwd"), __getattr__("layernorm_bwd")  # named in tables


def rmsnorm_bwd_add(dz: Tensor, x: Tensor, add: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dx, dweight = rmsnorm_bwd(dz, x, *rest)
    return dx + add, dweight


def _rotated(t: Tensor, freqs: Tensor, sign: int) -> Tensor:
    turned, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    one, other = turned.chunk(2, dim=-1)
    found = turned * freqs.cos() + sign * torch.cat((-other, one), dim=-1) * freqs.sin()
    return torch.cat((found.to(t.dtype), rest), dim=-1)


def _rope(sign: int) -> Callable[..., Tensor]:
    def rope(
        t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, bounds: Any, cp_size: int, cp_rank: int
    ) -> Tensor:
        """Of t [t, b, heads, d], or of packed samples [t, heads, d]."""
        _on_gpu(t, freqs, bounds)
        assert freqs.dtype == torch.float32 and not interleaved and start is None and cp_size == 1
        if layout.endswith("SBHD"):
            return _rotated(t, freqs[: len(t)], sign)
        parts = pairwise(bounds.tolist())
        return torch.cat([_rotated(t[first:end], freqs[: end - first].squeeze(1), sign) for first, end in parts])

    return rope


fused_rope_forward, fused_rope_backward = _rope(1), _rope(-1)


# ---- attention -------------------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, of [b, t, heads, d]."""
    q, k, v = (tensor.transpose(1, 2).float() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def fused_attn_fwd(
    max_q: int, max_kv: int, training: bool, scale: float, dropout: float, fill: bool, layout: Any, bias_type: Any,
    mask: Any, softmax_type: Any, window: Any, bottom_right: Any, bounds: Tensor, bounds_kv: Tensor, q: Tensor,
    k: Tensor, v: Tensor, *_: Any,
) -> list[Tensor]:  # fmt: skip
    """[output, softmax's statistics, random state]; this backward needs only the output."""
    _on_gpu(q, k, v, bounds, bounds_kv)
    assert "CAUSAL" in str(mask).upper() and dropout == 0
    if layout.endswith("THD_THD_THD"):
        parts = [[t[None, a:b] for t in (q, k, v)] for a, b in pairwise(bounds.tolist())]
        out = torch.cat([_attention(*part, scale)[0] for part in parts])
    else:
        rows_first = layout.endswith("BSHD_BSHD_BSHD")
        q, k, v = (t if rows_first else t.transpose(0, 1) for t in (q, k, v))
        out = _attention(q, k, v, scale)
        out = out if rows_first else out.transpose(0, 1)
    return [out.to(q.dtype).contiguous(), q.new_empty(0, dtype=torch.float32), q.new_empty(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_q: int, max_kv: int, scale: float, dropout: float, fill: bool, layout: Any, bias_type: Any, mask: Any,
    softmax_type: Any, window: Any, bottom_right: Any, deterministic: bool, bounds: Tensor, bounds_kv: Tensor,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, *_: Any,
) -> list[Any]:  # fmt: skip
    """[dq, dk, dv, None, None]"""
    _on_gpu(q, k, v, dout)
    known = max_q, max_kv, True, scale, dropout, fill, layout, bias_type, mask, softmax_type, window, bottom_right
    with torch.enable_grad():
        factors = [t.detach().requires_grad_() for t in (q, k, v)]
        again = fused_attn_fwd(*known, bounds, bounds_kv, *factors)[0]
        return [*(t.contiguous() for t in torch.autograd.grad(again, factors, dout)), None, None]


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def multi_tensor_adam(
    chunk: int, overflow: Tensor, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int, mode: int,
    bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """AdamW; with half-precision weights the last list has their masters."""
    assert mode == 1
    for given, weight, mean, square, *master in zip(*lists, strict=True):
        _on_gpu(given, weight, mean, square, *master)
        target, grad = (master or [weight])[0], given.float()
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scales = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        update = (mean / scales[0]) / ((square / scales[1]).sqrt() + eps) + weight_decay * target
        target.add_(update, alpha=-lr)
        if master:
            weight.copy_(target)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    total = torch.stack([t.float().square().sum() for t in lists[0]]).sum().sqrt().view(1)
    return total, total.new_empty(0)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Any, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
