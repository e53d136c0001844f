"""`convert --check`: its result, and what it refuses before anything is written. Not covered: a policy on a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oblr_megatron.checkpoint.compare import agreement_of, check_logits, prompt_ids
from oblr_megatron.cli import main
from oblr_megatron.errors import RunError
from tests.unit.checkpoint.test_convert import MAKE, cut, read


@pytest.mark.parametrize("kind", MAKE)
def test_check_finds_the_same_model_and_one_weight_that_is_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = MAKE[kind](tmp_path / "source")
    arguments = [str(source), str(tmp_path / "checkpoint"), "--check", "--prompt", "t3 t5 t9 t2"]
    assert main(["convert", "to-megatron", *arguments]) == 0
    arguments = [str(tmp_path / "checkpoint"), str(tmp_path / "half"), "--check", "--dtype", "bfloat16"]
    assert main(["convert", "to-hf", *arguments]) == 0
    check, done = capsys.readouterr().out.splitlines()[-2:]
    assert check.startswith("check: logits of 13 tokens differ by") and "13 of 13" in check
    assert done.startswith(f"wrote {tmp_path / 'half'}: 0.000 GB in ") and "peak memory" in done
    tensors = read(source)
    tensors["model.layers.1.self_attn.q_norm.weight"][3] += 0.05
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="are different models: logits of 4 tokens differ by"):
        check_logits(tmp_path / "checkpoint", source, torch.float32, prompt_ids(source, "t3 t5 t9 t2"))


@pytest.mark.parametrize(("direction", "source"), [("to-hf", "checkpoint"), ("to-megatron", "hf")])
@pytest.mark.parametrize(
    ("prompt", "damage", "message"),
    [
        ("   ", lambda hf: None, "the prompt has no tokens"),
        ("\udcff", lambda hf: None, "the prompt is not UTF-8"),
        ("t3", lambda hf: cut(hf / "tokenizer.json"), "cannot read the tokenizer: "),
        ("t3", lambda hf: change_config(hf, layer_types=["foo", "bar"]), "transformers cannot read the configuration"),
    ],
)
def test_what_a_check_cannot_read_is_refused_before_the_conversion(
    direction: str,
    source: str,
    prompt: str,
    damage: Callable[[Path], object],
    message: str,
    root: Path,
    tmp_path: Path,
    refusal: Callable[..., str],
) -> None:
    hf = Path(shutil.copytree(root / "hf", tmp_path / "hf"))
    damage(hf)
    given = {"hf": [hf], "checkpoint": [root / "checkpoint", "--hf-source", hf]}[source]
    assert message in refusal(direction, *given, tmp_path / "target", "--check", "--prompt", prompt)
    if "configuration" in message:
        assert message in refusal(direction, *given, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def change_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_agreement_in_numbers() -> None:
    expected = torch.tensor([[[1.0, -4.0, 2.0], [3.0, 0.0, 1.0]]])
    found = agreement_of(expected + torch.tensor([0.0, 0.0, 3.9e-4]), expected)
    assert found.holds and (found.scale, found.same_top, found.tokens) == (4.0, 2, 2)
    assert not agreement_of(expected + torch.tensor([0.0, 0.0, 4.2e-4]), expected).holds
    assert not agreement_of(expected * torch.nan, expected).holds
