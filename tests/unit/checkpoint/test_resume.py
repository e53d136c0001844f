"""A checkpoint is continued only with the model that it was made with, as far as the run computes with it.

Not covered: settings (tests/unit/test_opening.py), whole runs (tests/distributed/test_resume.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.resume import HF_CONFIG, Checkpoint, check_fits
from oblr_megatron.checkpoint.store import Manifest
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from tests.tiny import LLAMA3_ROPE, SIZES, make_hf_dir, make_moe_hf_dir
from tests.unit.configs import config_with

ROPE: dict[str, Any] = SIZES["rope_parameters"]


def config_of(model: Path, *overrides: str) -> Config:
    return config_with(*overrides, model={"path": str(model)})


def made_from(model: Path, path: Path, *overrides: str, **facts: Any) -> Checkpoint:
    """A checkpoint of a run that began with the model; only what `check_fits` reads."""
    (path / HF_CONFIG).parent.mkdir(parents=True)
    shutil.copy(model / "config.json", path / HF_CONFIG)
    return Checkpoint(path, Manifest(4, {}, {"config": config_of(model, *overrides).model_dump(mode="json")} | facts))


@pytest.mark.parametrize(
    ("make", "changed", "named"),
    [
        (make_hf_dir, {"rope_parameters": ROPE | {"rope_theta": 5e6}}, "rope_theta 10000.0, not 5000000.0"),
        (make_hf_dir, {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06, not 1e-05"),
        (make_moe_hf_dir, {"num_experts_per_tok": 3}, "num_experts_per_tok 2, not 3"),
        (make_moe_hf_dir, {"norm_topk_prob": False}, "norm_topk_prob True, not False"),
        (
            lambda path, **changes: make_hf_dir(path, family="llama", **changes),
            {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}},
            "factor 8.0, not 32.0",
        ),
    ],
)
def test_a_model_of_the_same_sizes_that_computes_otherwise_is_refused(
    make: Callable[..., Path], changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    model, other = make(tmp_path / "model"), make(tmp_path / "other", **changed)
    checkpoint = made_from(model, tmp_path / "step")
    check_fits(checkpoint, config_of(model), check_hf_dir(model))
    with pytest.raises(UserError, match=f"the checkpoint's model differs from {other}: {named}"):
        check_fits(checkpoint, config_of(other), check_hf_dir(other))


def test_the_reference_of_a_kl_penalty_has_the_same_weights(tmp_path: Path) -> None:
    """Without the penalty model.path gives no weights to a resumed run. A checkpoint may lack the record."""
    kl, model, other = "algo.kl_coefficient=0.1", make_hf_dir(tmp_path / "model"), make_hf_dir(tmp_path / "b", seed=1)
    checkpoint = made_from(model, tmp_path / "step", kl, base=check_hf_dir(model).fingerprint)
    check_fits(checkpoint, config_of(model, kl), check_hf_dir(model))
    with pytest.raises(UserError, match=f"KL penalty has another reference than {other}.*model.path to {model}"):
        check_fits(checkpoint, config_of(other, kl), check_hf_dir(other))
    check_fits(checkpoint, config_of(other), check_hf_dir(other))
    check_fits(made_from(model, tmp_path / "before", kl), config_of(other, kl), check_hf_dir(other))
