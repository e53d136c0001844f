"""The layers' operations on a CPU against megatron-core's formulas in torch operations."""

from functools import partial

import pytest
import torch

from oblr_megatron.model.cpu.operations import SwiGLU, apply_rotary


def by_operations(x: torch.Tensor) -> torch.Tensor:
    """What megatron-core's MLP computes without a fused kernel."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gated_unit_is_equal_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 3, 2 * 29, generator=generator).mul(3).to(dtype).requires_grad_()
    dy = torch.randn(37, 3, 29, generator=generator).to(dtype)
    outputs = by_operations(x), SwiGLU(None)(x)  # type: ignore[arg-type]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(output, x, dy)[0] for output in outputs]
    assert torch.equal(*grads)


def test_the_gated_unit_keeps_its_input_only() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SwiGLU(None)(x)  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


@pytest.mark.parametrize("shape", [(9, 5, 4, 16), (31, 1, 2, 8)])  # rows, and packed as megatron-core passes it
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0)])
def test_the_rotary_embedding(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_bshd
    original = getattr(original, "args", [original])[0]  # the shim may be installed
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(dtype)
    x = joint[..., : shape[-1]].requires_grad_()  # a part of the joint projection
    dy = torch.randn(shape, generator=generator).to(dtype)
    angles = torch.randn(shape[0], 1, 1, shape[-1] // 2, generator=generator).repeat(1, 1, 1, 2)
    found = [
        output(x, angles, rotary_interleaved=False, mscale=1.0)
        for output in (original, partial(apply_rotary, original))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=rtol)
    grads = [torch.autograd.grad(output, x, dy)[0] for output in found]
    torch.testing.assert_close(grads[1], grads[0], rtol=rtol, atol=rtol)
