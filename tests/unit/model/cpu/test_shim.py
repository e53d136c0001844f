"""The CPU shim: it installs only without CUDA, leaves the rest of torch unchanged, and uninstalls completely.

Not covered: whether it suffices for megatron-core; every distributed test runs on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.optimizer as megatron_optimizers
import megatron.core.optimizer.clip_grads as megatron_clipping
import megatron.core.optimizer.distrib_optimizer as megatron_distributed
import megatron.core.optimizer.optimizer as megatron_optimizer
import megatron.core.pipeline_parallel.schedules as megatron_schedules
import megatron.core.tensor_parallel.mappings as megatron_mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as megatron_moe
import megatron.core.transformer.utils as megatron_utils
import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from transformers import Qwen3ForCausalLM

from oblr_megatron.model import cpu
from tests.tiny import make_hf_dir

OWNERS: list[Any] = [
    torch,
    torch.cuda,
    torch.cuda.random,
    torch.Tensor,
    MoEAlltoAllTokenDispatcher,
    megatron_clipping,
    megatron_distributed,
    megatron_mappings,
    megatron_moe,
    megatron_optimizer,
    megatron_optimizers,
    megatron_random,
    megatron_schedules,
    megatron_utils,
]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Start each test without the shim, and restore its earlier state afterwards."""
    found = cpu.installed()
    cpu.uninstall()
    yield
    if found:
        cpu.install()


@pytest.fixture
def shim() -> Iterator[None]:
    assert cpu.install()
    yield
    cpu.uninstall()


def attributes() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in OWNERS]


def test_uninstall_restores_every_original() -> None:
    before = attributes()
    assert cpu.install()
    assert cpu.install()  # the second call changes nothing; one uninstall undoes both
    assert cpu.installed()
    assert attributes() != before
    cpu.uninstall()
    assert not cpu.installed()
    assert attributes() == before
    cpu.uninstall()


def test_nothing_is_replaced_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = attributes()
    assert not cpu.install()
    assert not cpu.installed()
    with cpu.cuda_type_names():
        assert torch.zeros(1).type() == "torch.FloatTensor"
    assert attributes() == before


@pytest.mark.usefixtures("shim")
def test_megatrons_random_state_is_separate_from_torchs() -> None:
    before = torch.get_rng_state()
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    outside = torch.cuda.get_rng_state()
    with tracker.fork("a"):
        inside = torch.cuda.get_rng_state()
    assert not torch.equal(inside, outside)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("shim")
def test_only_megatrons_modules_read_cuda_as_the_cpu() -> None:
    assert megatron_schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert megatron_schedules.torch.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@pytest.mark.usefixtures("shim")
def test_transformers_still_loads_its_models(tmp_path: Path) -> None:
    """transformers builds models under a device context, which a replaced torch.zeros would ignore."""
    model = Qwen3ForCausalLM.from_pretrained(make_hf_dir(tmp_path))
    expected = model.model.rotary_emb.compute_default_rope_parameters(model.config)[0]
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.usefixtures("shim")
def test_type_names_are_those_of_cuda_only_inside_the_context() -> None:
    tensor = torch.zeros(1, dtype=torch.bfloat16)
    with cpu.cuda_type_names():
        assert tensor.type() == "torch.cuda.BFloat16Tensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.BFloat16Tensor"
