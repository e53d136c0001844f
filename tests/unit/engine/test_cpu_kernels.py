"""Norms and draws of an engine on a CPU against vLLM's own methods. Not covered: whole engines (tests/e2e)."""

from importlib.util import find_spec, module_from_spec

import pytest
import torch

from oblr_megatron.engine.cpu import kernels

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def norm_of():
    """Makes a vLLM RMSNorm of a width, with random weights."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    def make(width: int, dtype: torch.dtype) -> RMSNorm:
        norm = RMSNorm(width, eps=1e-6, dtype=dtype)
        norm.weight.data = torch.rand(width, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
        return norm

    with set_current_vllm_config(VllmConfig()):
        yield make


@dtypes
@pytest.mark.parametrize("width", [16, 48, 96, 20])  # 20: the kernel would read past the end
def test_norms(norm_of, dtype, width):
    norm, generator = norm_of(width, dtype), torch.Generator().manual_seed(2)
    joint = torch.randn(7, 4 * width, generator=generator).to(dtype)
    heads = joint[:, : 3 * width].view(7, 3, width)  # as q in the joint projection: rows are not contiguous
    for x in (joint[:, :width].clone(), heads):
        expected = norm.forward_native(x.clone())
        torch.testing.assert_close(kernels.rms_norm(norm, x), expected, rtol=1e-5, atol=1e-6)


@dtypes
def test_norms_with_a_residual(norm_of, dtype):
    norm, generator = norm_of(32, dtype), torch.Generator().manual_seed(3)
    x, residual = (torch.randn(7, 32, generator=generator).to(dtype) for _ in range(2))
    expected = norm.forward_native(x.clone(), residual.clone())
    made = kernels.rms_norm(norm, x, residual)
    for part, exact in zip(made, expected, strict=True):
        torch.testing.assert_close(part, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("k", "p"), [(None, None), (3, None), (None, 0.7)])
def test_draws_are_vllms_own(k, p):
    """Also where rows share a generator, and where a row has none: that one draws from torch's global generator."""
    spec = find_spec("vllm.v1.sample.ops.topk_topp_sampler")
    vllms = module_from_spec(spec)  # another test may have run the plugin, which replaces the method in vLLM's module
    spec.loader.exec_module(vllms)
    rows, width = 9, 11
    top_k = None if k is None else torch.full((rows,), k)
    top_p = None if p is None else torch.full((rows,), p)

    def draws(forward):
        shared = torch.Generator().manual_seed(99)
        generators = {row: torch.Generator().manual_seed(row) for row in range(6)} | {6: shared, 7: shared}
        torch.manual_seed(5)
        drawn = []
        for step in range(20):
            logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
            drawn.append(forward(vllms.TopKTopPSampler("processed_logprobs"), logits, generators, top_k, top_p))
        return [torch.stack(parts) for parts in zip(*drawn, strict=True)]

    for made, expected in zip(draws(kernels.sample), draws(vllms.TopKTopPSampler.forward_cpu), strict=True):
        assert torch.equal(made, expected)


def test_another_replacement_of_the_norm_stays(monkeypatch):
    """vLLM runs the plugin again when it loads a model, after `extras.exact_sums` has replaced the norm."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_cpu)
    for first, last in ((None, kernels.rms_norm), (print, print)):
        with monkeypatch.context() as patch:
            patch.setattr(RMSNorm, "forward_cpu", first, raising=False)
            if first is None:
                patch.delattr(RMSNorm, "forward_cpu")
            kernels.install()
            assert RMSNorm.forward_cpu is last


@dtypes
def test_an_adapter_is_added_as_by_vllms_own_products(dtype):
    """To a fused layer of three matrices, in a slot of a higher rank; and not to a batch without an adapter."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    draw, sizes, tokens = torch.Generator().manual_seed(4), (6, 3, 3), 5
    wrapper = PunicaWrapperCPU(16, 4, torch.device("cpu"))
    x, y = (torch.randn(tokens, width, generator=draw).to(dtype) for width in (8, sum(sizes)))
    a = tuple(torch.randn(1, 1, 4, 8, generator=draw).to(dtype) for _ in sizes)
    b = tuple(torch.randn(1, 1, size, 4, generator=draw).to(dtype) for size in sizes)
    for one in a:
        one[0, 0, 3:] = 0  # the padding
    for number in (1, 0):
        wrapper.update_metadata(LoRAMapping((number,) * tokens, (number,) * tokens, is_prefill=True), [1], 2, 37)
        expected, made = y.clone(), y.clone()
        inner = tuple(torch.zeros(tokens, 4) for _ in sizes)
        wrapper.add_shrink(inner, x, a, 1.0)
        wrapper.add_expand(expected, inner, b, sizes)
        kernels.add_adapter(wrapper, made, x, a, b, 1.0, sizes)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.06}
        torch.testing.assert_close(made, expected, **tolerance)
        assert torch.equal(made, y) == (number == 0)
