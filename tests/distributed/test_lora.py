"""A policy with adapters: its merged weights, its first values, and the model that is left without them. fp64.

Not covered: norms (test_gradnorm_modes.py), checkpoints (test_resume.py), experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oblr_megatron.model.lora.adapters import initialize, is_adapter, switched_off
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.adapters import LORA, factors, fill, merged
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import load_policy, logits_by_position, make_batches
from tests.tiny import make_hf_dir

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("models") / "m", dtype=torch.float64, num_hidden_layers=4)


def merged_weights(path: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """For each layout the merged weights, and those of a fresh adapter with ones in B."""
    results = []
    for sizes in LAYOUTS:
        with layout(**sizes) as parallel:
            policy = load_policy(path, parallel, lora=LORA | {"targets": TARGETS})
            plain = dict(MegatronWeights(policy, merged=False))
            fill(policy)
            whole = {name: tensor.clone() for name, tensor in MegatronWeights(policy)}
            initialize(policy, 7)
            assert all(torch.equal(tensor, plain[name]) for name, tensor in MegatronWeights(policy))
            for name, parameter in policy.named_parameters():
                if is_adapter(name) and name.endswith("B.weight"):
                    torch.nn.init.ones_(parameter)
            results.append((whole, {name: tensor.clone() for name, tensor in MegatronWeights(policy)}))
    return results


def test_merged_weights_are_equal_in_every_layout(path: Path) -> None:
    base = load_file(path / "model.safetensors")
    expected = merged(base, factors(base, TARGETS))
    ranks = run_ranks(merged_weights, 2, path)
    fresh = ranks[0][-1][1]
    for whole, first in (result for rank in ranks for result in rank):
        for name, tensor in expected.items():
            torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-13)
            torch.testing.assert_close(first[name], fresh[name], rtol=0, atol=1e-13)
    adapted = [name for name in base if name.endswith(tuple(f"{target}.weight" for target in TARGETS))]
    assert [name for name in base if not torch.equal(fresh[name], base[name])] == adapted


def logits_without(path: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Logits with the adapters, with adapters switched off, and of a model without any."""
    with layout() as parallel:
        policy, plain = load_policy(path, parallel, lora=LORA), load_policy(path, parallel)
        fill(policy)
        on = logits_by_position(policy, make_batches())
        with switched_off(policy):
            off = logits_by_position(policy, make_batches())
        model = logits_by_position(plain, make_batches())
        assert on and off and model
        return [x for _, x in on], [x for _, x in off], [x for _, x in model]


def test_a_policy_with_its_adapters_off_is_the_model(path: Path) -> None:
    ((on, off, model),) = run_ranks(logits_without, 1, path)
    assert all(torch.equal(a, b) for a, b in zip(off, model, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(on, model, strict=True))
