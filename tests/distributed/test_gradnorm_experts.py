"""A mixture of experts: norms and gradient are the oracle's in every expert layout, fp64, relative 1e-10.

Where replicas share experts (EP x ETP above TP x CP), an expert's gradient mixes their samples. Only `two_pass` works
there: it tells samples apart by the dispatcher's order. Elsewhere every mode works.

Not covered: Transformer Engine's grouped experts, CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oblr_megatron.gradient.step import TrainingGradient
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_gradnorm_modes import (
    GROUP,
    PROMPTS,
    RTOL,
    check,
    config_of,
    expected,
    make_samples,
    policy_of,
    relative_difference,
    step_of,
)
from tests.tiny import make_moe_hf_dir

MODES = {name: {"mode": name} for name in ("two_pass", "stash", "bookkeep", "inline")}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "ep2": {"ep": 2},
        "tp2sp": {"tp": 2, "sp": True},
        "tp2sp ep2": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
        "tp2sp etp1": {"tp": 2, "sp": True, "etp": 1},  # whole experts on both tensor-parallel ranks
        "pp2": {"pp": 2},
        "cp2": {"cp": 2},  # whole experts on both ranks of a sequence
        "cp2 ep2": {"cp": 2, "ep": 2},
    },
    4: {
        "ep4": {"ep": 4},
        "tp2sp ep2": {"tp": 2, "sp": True, "ep": 2},
        "tp2sp ep4": {"tp": 2, "sp": True, "ep": 4, "etp": 1},  # across tensor- and data-parallel ranks
        "tp4sp ep2": {"tp": 4, "sp": True, "ep": 2, "etp": 1},  # on half of a replica's ranks
        "pp2 ep2": {"pp": 2, "ep": 2},
        "ep2 dp4": {"ep": 2},
    },
}


def on_ranks(path: str, layouts: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    results = {}
    for name, sizes in layouts.items():
        with layout(**sizes) as parallel:
            plain: dict[str, torch.Tensor] = {}
            for mode, gradnorm in MODES.items() if parallel.block_size == 1 else [("two_pass", MODES["two_pass"])]:
                config = config_of(path, gradnorm, folds=4)
                found = step_of(path, parallel, config, again=name == next(iter(layouts)))
                gradient = found.pop("gradient")
                plain = plain or gradient
                found["difference"] = max(relative_difference(gradient[key], plain[key]) for key in plain)
                results[name, mode] = found
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_moe_hf_dir(tmp_path_factory.mktemp("moe"), seed=7, dtype=torch.float64))


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_mode_is_the_oracles_step(model: str, world_size: int) -> None:
    check(expected(model), run_ranks(on_ranks, world_size, model, LAYOUTS[world_size]))


SHARES = ([True, True, False, True], [False, True, False, False])


def of_some_prompts(path: str) -> list[torch.Tensor]:
    """Norms of the prompts in each share, by replicas that all hold a part of every expert."""
    with layout(ep=2) as parallel:
        config = config_of(path, MODES["two_pass"], folds=2)
        gradients = TrainingGradient(policy_of(path, parallel, config), config)
        return [gradients.norms(make_samples(), torch.tensor(share)) for share in SHARES]


def test_norms_of_some_prompts_where_replicas_share_experts(model: str) -> None:
    """`gradnorm.sample_fraction`: a replica may have fewer of the measured prompts than another, or none."""
    whole = expected(model)["norms"].view(PROMPTS, GROUP)
    active = whole.any(-1)  # the oracle leaves a group of equal rewards out
    for found in run_ranks(of_some_prompts, 2, model):
        norms_of = [norms.view(PROMPTS, GROUP) for norms in found]
        for norms, share in zip(norms_of, torch.tensor(SHARES), strict=True):
            assert not norms[~share].any() and norms[share].any()
            torch.testing.assert_close(norms[share & active], whole[share & active], rtol=RTOL, atol=0)
