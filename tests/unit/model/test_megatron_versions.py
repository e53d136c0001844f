"""What differs between versions of megatron-core, under the installed one. Not covered: the versions not installed."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from oblr_megatron.model.megatron_versions import compile_recomputation, linear_forward, mlp_submodules, take_rates

GPT_MODEL = "megatron.core.models.gpt.gpt_model"


def test_the_linear_layers_forward_is_the_product() -> None:
    saved: list[torch.Tensor] = []
    context: Any = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    x, weight = torch.randn(3, 2, 4), torch.nn.Parameter(torch.randn(5, 4))
    output = linear_forward(context, x, weight, False, False, None)  # type: ignore[arg-type]  # one rank, no group
    assert torch.equal(output, x @ weight.t())
    assert saved[0] is x and saved[1] is weight
    assert (context.allreduce_dgrad, context.sequence_parallel, context.tp_group) == (False, False, None)


@pytest.mark.parametrize("make", [ModuleSpec, partial], ids=["to 0.17", "from 0.18"])
def test_a_mixtures_parts_are_found_in_both_kinds_of_spec(make: Any) -> None:
    parts = MoESubmodules(experts=None)
    mlp = make(module=MoELayer, submodules=parts) if make is ModuleSpec else make(MoELayer, submodules=parts)
    layer: Any = SimpleNamespace(submodules=SimpleNamespace(mlp=mlp))
    assert mlp_submodules(layer) is parts


def test_only_the_notice_of_deprecation_is_kept_off_the_console(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(GPT_MODEL)
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("another warning of the model")
    assert caplog.messages == ["another warning of the model"]


def test_groups_that_were_stored_at_another_rate_are_found() -> None:
    flags = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}

    def groups(lr: float) -> list[dict[str, Any]]:
        return [{"wd_mult": decays, "max_lr": lr, "min_lr": 0.0, "params": [], **flags} for decays in (1.0, 0.0)]

    own, saved = groups(2.0), groups(1.0)
    take_rates(saved, own)
    found = MegatronOptimizer._filter_and_reorder_param_groups(own, saved)
    assert [group["wd_mult"] for group in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8}, {"betas": (0.8, 0.9), "eps": 1e-6}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
    ],
)
def test_a_resume_takes_its_own_betas_eps_and_momentum(kind: Any, before: dict[str, Any], now: dict[str, Any]) -> None:
    """torch takes the stored groups as they are."""
    weight = torch.nn.Parameter(torch.ones(3))
    saved = kind([weight], lr=1.0, **before).state_dict()
    optimizer = kind([weight], lr=1.0, **now)
    take_rates(saved["param_groups"], optimizer.param_groups)
    optimizer.load_state_dict(saved)
    assert now.items() <= optimizer.param_groups[0].items()


@pytest.mark.timeout(60)
def test_a_lock_of_a_killed_compilation_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits without end for a lock file that nobody will remove."""
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "_get_share_storage"):
        pytest.skip("megatron-core before 0.19 compiles nothing")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left = tmp_path / "share_storage_ext" / "lock"
    left.parent.mkdir()
    left.touch()
    found: list[bool] = []
    monkeypatch.setattr(random, "_get_share_storage", lambda: found.append(left.exists()))
    compile_recomputation()
    assert found == [False]
