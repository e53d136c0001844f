"""The parts of `quantize` that need no modelopt: rows, comparison, answers, arguments. tests/e2e runs the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from oblr_megatron.cli import main
from oblr_megatron.config import DataConfig
from oblr_megatron.errors import EXIT_USER, RunError, UserError
from oblr_megatron.extras.quantize import quantize_command as command
from oblr_megatron.extras.quantize.accuracy import Accuracy, count_right, transformers_greedy, with_transformers
from oblr_megatron.extras.quantize.calibration import MAX_HELD_OUT, pack, read_rows
from oblr_megatron.extras.quantize.fidelity import CHUNK, LogitComparison
from oblr_megatron.extras.quantize.fp8 import Written, check_written, quiet
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.types import Prompt
from tests.tiny import VOCAB, make_hf_dir, make_moe_hf_dir, make_tokenizer
from tests.unit.configs import config_with

ROWS = [(5, 9, 2, 30), (7, 11), (3,), (12, 13, 14, 15, 16)]


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 12))
def test_every_row_is_packed_once_in_order_within_the_limit(lengths: list[int], limit: int):
    rows = [tuple(range(10 * index, 10 * index + length)) for index, length in enumerate(lengths)]
    batches = pack(rows, limit)
    assert [token for batch in batches for token in batch.input_ids[0].tolist()] == [t for row in rows for t in row]
    assert sum(batch.num_rows for batch in batches) == len(rows)
    for batch in batches:
        assert batch.input_ids.shape == batch.position_ids.shape
        assert batch.input_ids.numel() <= limit or batch.num_rows == 1
        assert (batch.position_ids == 0).sum() == batch.num_rows


@pytest.mark.parametrize("make", [make_hf_dir, make_moe_hf_dir])
def test_packed_rows_do_not_see_each_other(tmp_path, make):
    path = make(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", experts_implementation="eager")
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).logits[0] for row in ROWS])
        (batch,) = pack(ROWS)
        packed = model(**batch.arguments(model.device)).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_comparison_is_the_formulas_over_all_positions():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(CHUNK + 44, VOCAB, generator=generator)
    after = before + 0.3 * torch.randn(before.shape, generator=generator)
    comparison = LogitComparison()
    comparison.add(before[:7], after[:7])
    comparison.add(before[7:], after[7:])
    found = comparison.result()
    p, q = before.double().softmax(-1), after.double().softmax(-1)
    assert found.tokens == len(before)
    assert found.max_abs == (before - after).abs().max().item()
    assert found.mean_abs == pytest.approx((before - after).abs().double().mean().item(), rel=1e-6)
    assert found.original_rms == pytest.approx(before.double().square().mean().sqrt().item(), rel=1e-6)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert found.top1_agreement == (before.argmax(-1) == after.argmax(-1)).double().mean().item()
    assert 0 < found.top1_agreement < 1


def test_equal_logits_have_no_error():
    logits = torch.randn(5, VOCAB, dtype=torch.bfloat16)
    comparison = LogitComparison()
    comparison.add(logits, logits.clone())
    found = comparison.result()
    assert (found.max_abs, found.mean_abs, found.kl, found.top1_agreement) == (0, 0, 0, 1)


def test_files_that_differ_from_the_measured_weights_are_refused(tmp_path):
    weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale": torch.tensor(0.25), "a.input_scale": torch.tensor(0.5)}
    written = {"a.weight": Written(xxhash.xxh3_128(weight.view(torch.uint8).numpy().data).hexdigest(), 0.25, 0.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_written(tmp_path, written)
    other = weight.view(torch.uint8).clone()
    other[5, 3] ^= 1
    for changed in (
        {"a.weight": other.view(torch.float8_e4m3fn)},
        {"a.weight_scale": torch.tensor(0.26)},
        {"a.input_scale": torch.tensor(0.4)},
    ):
        save_file(tensors | changed, tmp_path / "model.safetensors")
        with pytest.raises(RunError, match=r"a\.weight"):
            check_written(tmp_path, written)
    save_file({"b.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"1 quantised weights .*a\.weight"):
        check_written(tmp_path, written)


def write_rows(path: Path, count: int, **columns: object) -> Path:
    rows = [{"question": f"t{2 + index % 30} t9", "answer": "t5"} | columns for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "asked", "calibrated", "held_out"), [(2, 512, 1, 1), (20, 512, 16, 4), (20, 3, 3, 4), (900, 512, 512, 32)]
)
def test_rows_are_divided(tmp_path, rows: int, asked: int, calibrated: int, held_out: int):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = read_rows(DataConfig(train=path), make_tokenizer(), asked)
    assert (len(found.calibration), len(found.held_out), found.skipped) == (calibrated, held_out, 0)
    assert calibrated + held_out <= min(rows, asked + MAX_HELD_OUT)
    assert found.calibration[0] == (2, 9)


def test_bad_and_flagged_rows_are_counted(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 4)
    flagged = json.dumps({"question": "t3", "answer": "t3", "overlaps_benchmark": True})
    path.write_text(path.read_text() + f"{flagged}\nnot json\n" + json.dumps({"question": "t2 " * 9, "answer": "1"}))
    found = read_rows(DataConfig(train=path, max_prompt_tokens=8), make_tokenizer(), 100)
    assert (len(found.calibration) + len(found.held_out), found.skipped) == (4, 3)


def test_one_row_is_not_enough(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 1)
    with pytest.raises(UserError) as error:
        read_rows(DataConfig(train=path), make_tokenizer(), 100)
    assert error.value.where == str(path)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 3.0, "suppress_tokens": [4, 5]}])
def test_greedy_answers_depend_neither_on_the_batch_nor_on_the_models_settings(tiny_hf, settings):
    model = AutoModelForCausalLM.from_pretrained(tiny_hf)
    model.generation_config.update(**settings)
    tokenizer = make_tokenizer()
    prompts = [Prompt(n, str(n), "", row, "", "") for n, row in enumerate([*ROWS, *((k, 4, k) for k in range(2, 20))])]
    samples = transformers_greedy(model, tokenizer, prompts, max_tokens=9)
    assert [sample.group for sample in samples] == list(range(len(prompts)))
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = list(prompt.token_ids)
        while len(ids) < len(prompt.token_ids) + 9 and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert sample.response_ids == tuple(ids[len(prompt.token_ids) :])
        assert sample.text == tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        assert sample.finish_reason == ("stop" if ids[-1] == tokenizer.eos_token_id else "length")
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    assert settings.items() <= model.generation_config.to_dict().items(), "they are back"


def test_right_answers_are_counted():
    found = count_right([1.0, 0.0, 0.5, 1.0])
    assert found == Accuracy(prompts=4, right=2, accuracy=0.5, low=found.low, high=found.high)
    assert 0 < found.low < 0.5 < found.high < 1
    assert count_right([1.0, 0.0], unscored=1).unscored == 1


class Late(Reward):
    """Late for the responses to these prompts, else 1."""

    def __init__(self, *late: int) -> None:
        self.late = late

    def score(self, prompts, samples):
        return RewardResult(
            [float(n not in self.late) for n in range(len(samples))], faults=dict.fromkeys(self.late, "late")
        )


def test_responses_without_a_score_are_counted(tiny_hf):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_hf), make_tokenizer()
    prompts = [Prompt(n, str(n), "", row, "", "") for n, row in enumerate(ROWS[:2])]
    config = config_with(model={"path": tiny_hf})
    found = with_transformers(model, tokenizer, {"s": prompts}, Late(1), config)["s"]
    assert (found.right, found.unscored) == (1, 1)
    with pytest.raises(RunError, match=r"'s'.*every response.*reward.timeout_s"):
        with_transformers(model, tokenizer, {"s": prompts}, Late(0, 1), config)


def test_both_engines_have_the_evaluations_limit(tiny_hf):
    lengths = []

    class Measured(Late):
        def score(self, prompts, samples):
            lengths.extend(len(sample.response_ids) for sample in samples)
            return super().score(prompts, samples)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_hf), make_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    prompts = [Prompt(n, str(n), "", row, "", "") for n, row in enumerate(ROWS[:4])]
    config = config_with("rollout.max_response_tokens=3", "evaluate.max_response_tokens=5", model={"path": tiny_hf})
    with_transformers(model, tokenizer, {"s": prompts}, Measured(), config)
    assert max(lengths) == 5


def test_a_librarys_output_is_shown_only_if_it_fails(capfd):
    with quiet():
        print("chatter")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError), quiet():
        print("the reason")
        raise ZeroDivisionError
    assert "the reason" in capfd.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The single error line of the command."""
    assert main(["quantize", *map(str, arguments)]) == EXIT_USER
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said.err
    assert said.err.splitlines()[-1] == lines[0]
    return lines[0]


def test_bad_arguments_are_refused_in_one_line(tmp_path, tiny_hf, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    out = tmp_path / "out"
    given = ["--calibration", rows]
    assert "does not exist" in refused(capsys, tmp_path / "no", out, *given)
    assert "argument --format: invalid choice: 'int4'" in refused(capsys, tiny_hf, out, *given, "--format", "int4")
    assert "the target exists" in refused(capsys, tiny_hf, tmp_path, *given)
    assert "the target cannot be created" in refused(capsys, tiny_hf, rows / "below", *given)
    assert "--calibration" in refused(capsys, tiny_hf, out)
    assert "cannot read the data set" in refused(capsys, tiny_hf, out, "--calibration", tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert "the data set is empty" in refused(capsys, tiny_hf, out, "--calibration", tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert "no usable row" in refused(capsys, tiny_hf, out, "--calibration", tmp_path / "bad.jsonl")
    assert "--num-samples" in refused(capsys, tiny_hf, out, *given, "--num-samples", 0)
    assert "--max-tokens" in refused(capsys, tiny_hf, out, *given, "--max-tokens", 0)
    assert "no usable row" in refused(capsys, tiny_hf, out, *given, "--max-tokens", 1)
    assert "cannot read the data set" in refused(capsys, tiny_hf, out, *given, "--accuracy", tmp_path / "no.jsonl")
    assert "unknown reward" in refused(capsys, tiny_hf, out, "reward.name=no", *given, "--accuracy", rows)
    episodes = "rollout.environment=tests.e2e.environments:play"
    assert "plays no episodes" in refused(capsys, tiny_hf, out, episodes, *given, "--accuracy", rows)
    assert not out.exists()


def test_a_foreign_model_is_refused(tmp_path, tiny_hf, capsys):
    foreign = make_hf_dir(tmp_path / "model")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "is not supported" in refused(capsys, foreign, tmp_path / "out", "--calibration", "rows.jsonl")


@pytest.mark.parametrize("installed", [None, "0.39.0"])
def test_another_modelopt_is_refused(tmp_path, tiny_hf, capsys, monkeypatch, installed):
    monkeypatch.setattr(command, "installed_version", {"nvidia-modelopt": installed}.__getitem__)
    said = refused(capsys, tiny_hf, tmp_path / "out", "--calibration", "rows.jsonl")
    assert "pip install" in said
    assert (installed or "not installed") in said


def test_modelopt_is_imported_by_the_command_alone():
    """Its import registers hooks in transformers and megatron-core."""
    import oblr_megatron.extras.quantize.pipeline

    assert oblr_megatron.extras.quantize.pipeline.fp8 is not None
    assert "modelopt" not in sys.modules
