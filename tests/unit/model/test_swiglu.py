"""The gated unit against megatron-core's formula in torch operations, to the last bit. Not covered: CUDA."""

import pytest
import torch

from oblr_megatron.model.swiglu import SwiGLU


def by_operations(x: torch.Tensor) -> torch.Tensor:
    """What megatron-core's MLP computes without a fused kernel."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 3, 2 * 29, generator=generator).mul(3).to(dtype).requires_grad_()
    dy = torch.randn(37, 3, 29, generator=generator).to(dtype)
    outputs = by_operations(x), SwiGLU(None)(x)  # type: ignore[arg-type]
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(output, x, dy)[0] for output in outputs]
    assert torch.equal(*grads)


def test_only_the_input_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        SwiGLU(None)(x)  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
