"""The smoke run's parts: model with Qwen3-0.6B's shape, tokenizer, reward, checks of a finished run.

Oracles: the published shape, arithmetic, records with one fault each.
Not covered: the run itself (tools/smoke.py, minutes on a CPU) and the memory it measures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from oblr_megatron.config import load_config
from oblr_megatron.rewards.registry import check_reward

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))  # scripts import their neighbours by name

import make_smoke_model  # noqa: E402
import smoke  # noqa: E402
import smoke_reward  # noqa: E402


def test_smoke_model_has_the_published_size() -> None:
    """596,049,920 parameters in 310 tensors, without the tied head (meta device: shapes only)."""
    tokenizer = make_smoke_model.train_tokenizer(make_smoke_model.SAMPLE_TEXTS)
    config = make_smoke_model.qwen3_0_6b(tokenizer, "bfloat16")
    with torch.device("meta"):
        named = dict(Qwen3ForCausalLM(config).named_parameters())
    assert sum(parameter.numel() for parameter in named.values()) == 596_049_920
    assert len(named) == 28 * 11 + 2 and "lm_head.weight" not in named
    assert len(tokenizer) <= make_smoke_model.MAX_TOKENS < config.vocab_size


def test_smoke_weights_keep_to_known_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a smaller model: dtype, seed, and small embedding rows for ids without a token."""
    tokenizer = make_smoke_model.train_tokenizer(make_smoke_model.SAMPLE_TEXTS)
    config = make_smoke_model.qwen3_0_6b(tokenizer, "bfloat16")
    for name, value in {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 9000}.items():
        setattr(config, name, value)
    config.layer_types = config.layer_types[:1]
    tensors, again = (make_smoke_model.random_weights(config, num_tokens=len(tokenizer), seed=seed) for seed in (0, 0))
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    rows = tensors["model.embed_tokens.weight"].float()
    assert rows[: len(tokenizer)].std() == pytest.approx(make_smoke_model.SCALE, rel=0.05)
    assert rows[len(tokenizer) :].std() == pytest.approx(make_smoke_model.UNKNOWN_SCALE, rel=0.05)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_smoke_tokenizer_is_lossless() -> None:
    tokenizer = make_smoke_model.train_tokenizer(make_smoke_model.SAMPLE_TEXTS)
    for text in (*make_smoke_model.read_questions(make_smoke_model.SAMPLE_TEXTS), "naïve 3½ €\n\t漢字"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids


def test_smoke_sample_has_right_answers() -> None:
    """The answers equal the sums in the questions, computed here."""
    worked = [6 * 14 - 3, 850 * 2 * 5, (200 - 240 // 3) // 12, 48 // 3 + 7, 180 + 4 * (9 - 15), 160 - 24 - 48]
    worked += [2 * (35 + 20) - 4, 21 // 3 * 2]
    assert [
        int(row["answer"]) for row in map(json.loads, make_smoke_model.SAMPLE_TEXTS.read_text().splitlines())
    ] == worked


def test_smoke_reward_varies_and_is_bounded() -> None:
    texts = ["", "banana", "xyz", "AEIOU", "漢字"]
    assert [smoke_reward.share_of_vowels(text, "7", "3+4=") for text in texts] == [0.0, 0.5, 0.0, 1.0, 0.0]


def good_record(step: int) -> dict[str, float]:
    metrics = dict.fromkeys(smoke.FINITE, 0.5)
    extra = {"groups/mixed_fraction": 1.0, "weights/version": step, "rollout/logprob_abs_diff": 1e-6}
    return {"step": step, **metrics, **extra, "gradnorm/nonfinite": 0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"loss": float("nan")}, "loss = nan is not finite"),
        ({"timing_s/gradient": 0.0}, "timing_s/gradient = 0.0 is not above 0"),
        ({"weights/version": 1}, "a push was lost"),
        ({"groups/mixed_fraction": 0.0}, "no group has differing rewards"),
        ({"gradnorm/nonfinite": 2}, "2 norms were not finite"),
        ({"rollout/logprob_abs_diff": 0.4}, "trainer and vLLM differ by 0.4"),
    ],
)
def test_smoke_checks_find_each_fault(tmp_path: Path, change: dict[str, float], complaint: str | None) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"num_steps": 2, "model": {"dtype": "float32"}}')
    records = [good_record(1), good_record(2) | change]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    problems = smoke.check_run(tmp_path)
    assert len(problems) == (complaint is not None)
    assert complaint is None or complaint in problems[0]


def test_smoke_checks_find_missing_steps_and_export(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_steps": 2, "model": {"dtype": "float32"}}')
    record = good_record(1)
    del record["grad_norm"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    problems = " | ".join(smoke.check_run(tmp_path))
    assert "holds steps [1], not 1 to 2" in problems
    assert "grad_norm is missing" in problems
    assert "no export" in problems


def test_smoke_reward_is_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the repository's root, the registry finds the function that smoke.toml names."""
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "tools" / "smoke.toml")
    check_reward(config.reward, max_response_tokens=config.rollout.max_response_tokens)
