"""The vLLM plugin, and the check that layers read their parameters, on vLLM's own CPU kernels.

Not covered: a whole model's log-probs after a push (tests/e2e/test_rollout.py).
"""

import itertools
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from oblr_megatron.engine import plugin as vllm_plugin
from oblr_megatron.engine.cpu.packing import disable_for_experts, disable_for_layers
from oblr_megatron.engine.transfer import check_layers_read_parameters
from oblr_megatron.errors import WeightError


@pytest.fixture
def packing(monkeypatch):
    """vLLM's switches in their state without the plugin; restored afterwards."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils as layers
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    monkeypatch.setattr(unquantized, "backend_to_kernel_cls", unquantized.backend_to_kernel_cls)

    monkeypatch.setattr(ops, "_supports_onednn", hasattr(torch.ops._C, "create_onednn_mm_handler"))
    monkeypatch.setattr(layers, "check_cpu_sgl_kernel", layers.check_cpu_sgl_kernel)
    return ops, layers


def test_the_entry_point_leads_here():
    (ours,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "oblr_megatron"]
    assert ours.load() is vllm_plugin.register


def test_registering_twice_is_registering_once(packing):
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    vllm_plugin.register()
    vllm_plugin.register()
    for name in (vllm_plugin.SHM_BACKEND, vllm_plugin.IPC_BACKEND):
        assert WeightTransferEngineFactory._registry[name]().__module__ == "oblr_megatron.engine.transfer"


@pytest.mark.parametrize("plugin", [False, True])
def test_vllm_computes_with_a_stale_copy_unless_the_plugin_ran(packing, plugin):
    """Without the plugin vLLM's product stays the same after the weight is changed in place."""
    ops, layers = packing
    if not ops._supports_onednn:
        pytest.skip("this vLLM was built without oneDNN: nothing is packed")
    if plugin:
        disable_for_layers()
    layer = torch.nn.Linear(32, 48, bias=False).requires_grad_(False)
    layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    inputs = torch.randn(3, 32)
    layer.weight.mul_(-2)
    agrees = torch.allclose(layer.cpu_linear(inputs, layer.weight, None), inputs @ layer.weight.t(), atol=1e-4)
    assert agrees == plugin
    model = torch.nn.Sequential(layer)
    if plugin:
        check_layers_read_parameters(model)
    else:
        with pytest.raises(WeightError, match="computes 0 with"):
            check_layers_read_parameters(model)


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.usefixtures("packing")
def test_vllm_misreads_experts_that_were_pushed_unless_the_plugin_ran(plugin):
    """A layer's experts are overwritten as by a push; then each of three tokens goes to two of the three experts."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("this vLLM is for GPUs: it does not pack experts for a CPU")
    if plugin:
        disable_for_experts()
    *_, kind = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    sizes = SimpleNamespace(intermediate_size_per_partition=32, activation=MoEActivation.SILU)
    experts = kind.__new__(kind)
    experts.moe_config, experts.quant_config = sizes, FusedMoEQuantConfig.make()
    layer = torch.nn.Module()
    for name, rows, columns in (("w13_weight", 64, 96), ("w2_weight", 96, 32)):
        layer.register_parameter(name, torch.nn.Parameter(torch.randn(3, rows, columns), requires_grad=False))
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    experts.process_weights_after_loading(layer)
    fresh = torch.randn_like(layer.w13_weight.view(3, 64, 96)), torch.randn_like(layer.w2_weight.view(3, 96, 32))
    for parameter, tensor in zip((layer.w13_weight, layer.w2_weight), fresh, strict=True):
        parameter.view(-1).copy_(tensor.view(-1))
    inputs, ids, output = torch.randn(3, 96), torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.empty(3, 96)
    weights = torch.rand(3, 2)
    experts.apply(
        output, inputs, layer.w13_weight, layer.w2_weight, weights, ids.int(), MoEActivation.SILU, 3,
        *[None] * 6, apply_router_weight_on_input=False,
    )  # fmt: skip
    expected = torch.zeros(3, 96)
    for token, place in itertools.product(range(3), range(2)):
        gate, up = (fresh[0][ids[token, place]] @ inputs[token]).chunk(2)
        down = fresh[1][ids[token, place]]
        expected[token] += weights[token, place] * (down @ (torch.nn.functional.silu(gate) * up))
    assert torch.allclose(output, expected, rtol=1e-4, atol=1e-3) == plugin
    if plugin:
        check_layers_read_parameters(torch.nn.Sequential(layer))
    else:
        with pytest.raises(WeightError, match="computes 0 with"):
            check_layers_read_parameters(torch.nn.Sequential(layer))


def test_a_removed_weight_counts_as_packed():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(0))
    layer.cpu_linear = lambda x, weight, bias: x
    with pytest.raises(WeightError):
        check_layers_read_parameters(layer)


def test_a_vllm_without_the_switches_is_refused(packing, monkeypatch):
    ops, layers = packing
    monkeypatch.delattr(ops, "_supports_onednn")
    monkeypatch.delattr(layers, "check_cpu_sgl_kernel")
    with pytest.raises(RuntimeError, match=r"_supports_onednn.*check_cpu_sgl_kernel"):
        disable_for_layers()
