"""Adapters in PEFT's format: written, read back, merged; PEFT itself loads them to the same logits.

Not covered: vLLM's own reader (tests/e2e/test_adapter_push.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oblr_megatron.checkpoint import peft_dir
from oblr_megatron.checkpoint.convert import to_hf, to_megatron
from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checkpoint.peft_dir import CONFIG, TENSORS, check_adapter_dir, merge_adapter
from oblr_megatron.errors import UserError
from tests.adapters import ALL, Adapter, merged, write
from tests.tiny import make_hf_dir

IDS = torch.tensor([[3, 1, 4, 15, 9, 2, 6]])
ALPHA = 6.0
WEIGHTS = "model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> HFDir:
    return check_hf_dir(make_hf_dir(tmp_path / "base", tied=True))


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("targets", [ALL, ("k_proj", "down_proj")])
def test_the_merged_directory_and_checkpoint_have_the_weights_of_the_definition(
    base: HFDir, targets: tuple[str, ...], tmp_path: Path
) -> None:
    adapter = Adapter(base.path, 4, targets, seed=1)
    write(adapter, tmp_path / "adapter", alpha=ALPHA)
    merge_adapter(check_adapter_dir(tmp_path / "adapter", base), tmp_path / "merged")
    expected = merged(base.path, adapter, ALPHA)
    held = load_file(tmp_path / "merged" / "model.safetensors")
    assert held.keys() == base.shapes.keys()
    for name, tensor in held.items():
        torch.testing.assert_close(tensor, expected.get_parameter(name).data, rtol=1e-6, atol=1e-6)
    assert (logits(tmp_path / "merged") - logits(base.path)).abs().max() > 0.01
    to_megatron(tmp_path / "adapter", tmp_path / "checkpoint", base=base.path)
    to_hf(tmp_path / "checkpoint", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], held[name]) for name in again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_room_is_that_of_the_merged_dtype(
    dtype: torch.dtype, base: HFDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(peft_dir, "check_space", lambda _, size: asked.append(size))
    write(Adapter(base.path, 4, ALL, seed=1), tmp_path / "adapter", alpha=ALPHA)
    written = merge_adapter(check_adapter_dir(tmp_path / "adapter", base), tmp_path / "merged", dtype)
    assert asked == [written] == [sum(tensor.nbytes for tensor in load_file(tmp_path / "merged" / WEIGHTS).values())]


def test_peft_computes_the_logits_of_the_merged_model(base: HFDir, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write(Adapter(base.path, 4, ALL, seed=1), tmp_path / "adapter", alpha=ALPHA)
    merge_adapter(check_adapter_dir(tmp_path / "adapter", base), tmp_path / "merged")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.path), tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(IDS).logits
    torch.testing.assert_close(theirs, logits(tmp_path / "merged"), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    merge_adapter(check_adapter_dir(tmp_path / "saved", base), tmp_path / "from_peft")
    torch.testing.assert_close(logits(tmp_path / "from_peft"), theirs, rtol=1e-5, atol=1e-5)


def change_config(path: Path, **values: Any) -> None:
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | values))


def change_tensors(path: Path, edit: Any) -> None:
    save_file(dict(edit(load_file(path / TENSORS))), path / TENSORS)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / CONFIG).unlink(), "adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("{"), "JSON"),
        (lambda path: (path / TENSORS).unlink(), TENSORS),
        (lambda path: change_config(path, use_dora=True), "use_dora True"),
        (lambda path: change_config(path, rank_pattern={"q_proj": 8}), "rank_pattern"),
        (lambda path: change_config(path, init_lora_weights="pissa"), "pissa"),
        (lambda path: change_config(path, peft_type="IA3"), "IA3"),
        (lambda path: change_config(path, r=8), "[8, 48]"),
        (lambda path: change_tensors(path, lambda held: list(held.items())[1:]), "lora_"),
        (
            lambda path: change_tensors(path, lambda held: [(n.replace("s.1", "s.7"), t) for n, t in held.items()]),
            ".7.",
        ),
        (lambda path: change_tensors(path, lambda held: []), "no tensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(damage: Any, named: str, base: HFDir, tmp_path: Path) -> None:
    write(Adapter(base.path, 4, ALL, seed=1), tmp_path / "adapter", alpha=ALPHA)
    damage(tmp_path / "adapter")
    with pytest.raises(UserError) as error:
        check_adapter_dir(tmp_path / "adapter", base)
    assert named in str(error.value)


def test_the_scale_of_rslora_is_read(base: HFDir, tmp_path: Path) -> None:
    write(Adapter(base.path, 4, ALL, seed=1), tmp_path / "adapter", alpha=ALPHA)
    change_config(tmp_path / "adapter", use_rslora=True)
    assert check_adapter_dir(tmp_path / "adapter", base).scale == 3.0
