"""Each benchmark runs once at its smallest size and writes the rows it promises.

Not covered: whether the measured times are good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step
from step_system import Work

from tests.tiny import make_hf_dir

ROOT = Path(__file__).resolve().parents[3]
LAYER = 4096 * 1024 + 1024 + 2 * 1024 + 2 * 128 + 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 3072 * 1024  # parameters
SMALL = ["--layers", "1", "--vocab", "4096", "--rounds", "1"]
QUESTIONS = [("18", "9 + 9 = <<9+9=18>>18"), (r"\frac{\sqrt{3}}{2}", "cos 30")] * 3


def rows_of(script: str, directory: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that tools/bench/SCRIPT.py writes."""
    out = directory / "out.json"
    command = [sys.executable, f"tools/bench/{script}.py", "--json", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["rows"]


def assert_rates(rows: list[dict[str, Any]], num_bytes: int) -> None:
    for row in rows:
        assert row["bytes"] == num_bytes and row["seconds"] > 0
        assert row["gb_per_s"] * row["seconds"] * 1e9 == pytest.approx(num_bytes, rel=1e-9)


def assert_ratios_to_copy(rows: list[dict[str, Any]]) -> None:
    """In one round each ratio is that of the seconds."""
    for row in rows:
        assert row["ratio_to_copy"] * row["seconds"] == pytest.approx(rows[0]["seconds"], rel=1e-9)


def test_checkpoint(tmp_path: Path) -> None:
    rows = rows_of("checkpoint", tmp_path, *SMALL, "--dir", str(tmp_path))
    assert [row["what"] for row in rows] == ["copy", "blocked", "save", "load"]
    for row in rows:
        assert 1 <= row["bytes"] / (14 * LAYER) < 1.01, "weights in bf16, masters and two moments in fp32"
    assert_ratios_to_copy(rows)
    assert rows[1]["seconds"] < rows[2]["seconds"], "the blocked time is a part of the save"
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_convert(tmp_path: Path) -> None:
    rows = rows_of("convert", tmp_path, *SMALL, "--dir", str(tmp_path))
    assert [row["direction"] for row in rows] == ["copy", "to-megatron", "to-hf"]
    assert_rates(rows, 2 * LAYER)
    assert_ratios_to_copy(rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_push(tmp_path: Path) -> None:
    rows = rows_of("push", tmp_path, *SMALL, "--rows", "push", "push, cast")
    assert [row["transport"] for row in rows] == ["memcpy", "push", "push, cast"]
    assert_rates(rows, 2 * LAYER)
    assert rows[0]["ratio_to_memcpy"] == 1


def test_push_beside_a_reloading_engine(tmp_path: Path) -> None:
    rows = rows_of("push", tmp_path, *SMALL, "--rows", "save + reload")
    assert [row["transport"] for row in rows] == ["memcpy", "save + reload"]
    assert_rates(rows, 2 * LAYER)


def write_questions(directory: Path, *names: str) -> None:
    lines = [json.dumps({"answer": answer, "solution": solution}) for answer, solution in QUESTIONS]
    for name in names:
        (directory / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_golds(tmp_path: Path) -> None:
    write_questions(tmp_path, "gsm8k_train", "gsm8k_test", "math500", "olympiadbench", "dapo_math_17k")
    rows = rows_of("golds", tmp_path, "--data", str(tmp_path))
    assert len({row["set"] for row in rows}) == 5 and {row["expected"] for row in rows} == {"equal", "unequal"}
    assert all(row["rate"] == 1 - row["exceptions"] / row["count"] for row in rows)


def test_cases(tmp_path: Path) -> None:
    *rules, every = rows_of("cases", tmp_path)
    assert every["rule"] == "all" and every["cases"] == sum(row["cases"] for row in rules) == every["math"]


def test_balance(tmp_path: Path) -> None:
    """1 is a perfect division. By position no division is better than by tokens."""
    for row in rows_of("balance", tmp_path):
        assert 1 <= row["by_tokens"] <= row["by_position"]


def test_memory(tmp_path: Path) -> None:
    (row,) = rows_of("memory", tmp_path, "--cases", "two_pass shape=tiny layers=1 tokens=64 samples=2")
    assert row["mode"] == "two_pass" and 0.5 < row["ratio"] == row["estimated"] / row["measured"] < 1.5


def test_lm_head(tmp_path: Path) -> None:
    """Memory grows by hidden states and a few numbers a token, 100 times less than logits do."""
    short, long = rows_of("lm_head", tmp_path, "memory", "--tokens", "8192", "16384")
    more = {name: long[name] - short[name] for name in short}
    assert 0 < 100 * more["peak_bytes"] < more["whole_logits_bytes"]
    model = make_hf_dir(tmp_path / "model")
    plain, wide = rows_of("lm_head", tmp_path, "cost", str(model), "--rounds", "1")
    assert wide["head_dtype"] == "float32" and wide["ratio"] == wide["cpu_s"] / plain["cpu_s"]


def test_recorded(tmp_path: Path) -> None:
    """Arms without recorded tokens are their own base."""
    model = make_hf_dir(tmp_path / "model", head_dim=32)
    size = ["--prompts", "2", "--group", "2", "--tokens", "6", "--top-k", "5", "--rounds", "1", "--threads", "1"]
    rows = rows_of("recorded", tmp_path, str(model), *size)
    assert [(row["arm"], row["bytes"]) for row in rows] == [
        ("plain", 0),
        ("center", 8 * 32),
        ("filter", 0),
        ("replay", 8 * (5 + 8)),
    ]
    assert rows[0]["ratio"] == rows[2]["ratio"] == 1 and all(row["ratio"] > 0 for row in rows)
    assert all(rows[n + 1]["file_bytes"] > rows[n]["file_bytes"] for n in (0, 2))


def test_planner(tmp_path: Path) -> None:
    for row in rows_of("planner", tmp_path):
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])


def test_overlap(tmp_path: Path) -> None:
    small = ["--prompts", "4", "--group", "2", "--hidden", "64", "--layers", "1", "--max-tokens", "8"]
    rows = rows_of("overlap", tmp_path, *small, "--steps", "3", "--rounds", "1")
    assert [row["mode"] for row in rows] == ["none", "stream", "one_step"] and rows[0]["ratio"] == 1
    assert all(row["step_s"] > 0 and 0 < row["mean_length"] <= 8 for row in rows)


def test_routing_replay(tmp_path: Path) -> None:
    rows = rows_of("routing_replay", tmp_path, "--prompts", "8", "--group", "4", "--max-tokens", "16", "--steps", "3")
    assert [(row["engine"], row["replay"]) for row in rows] == [
        (dtype, replay) for dtype in ("float32", "bfloat16") for replay in (False, True)
    ]


def test_rollout(tmp_path: Path) -> None:
    rows = rows_of("rollout", tmp_path, "--prompts", "2", "--group", "2", "--max-tokens", "8", "--rounds", "1")
    assert [row["placement"] for row in rows] == ["bare", "bare, a run's options", "colocated", "server"]
    assert rows[0]["ratio_to_bare"] == 1
    assert all(row["samples"] == 4 and 0 < row["tokens"] <= 32 and row["tokens_per_s"] > 0 for row in rows)


def test_verifier(tmp_path: Path) -> None:
    write_questions(tmp_path, "gsm8k_test", "olympiadbench")
    rows = rows_of("verifier", tmp_path, "--rounds", "1", "--data", str(tmp_path))
    kinds = [f"{kind}-like{part}" for kind in ("GSM8K", "OlympiadBench") for part in ("", ", algebra")]
    assert [(row["answers"], row["judge"]) for row in rows] == [(k, j) for k in kinds for j in ("math", "math-verify")]
    assert [row["count"] for row in rows if not row["answers"].endswith("algebra")] == [len(QUESTIONS) * 8] * 4
    for row in rows:
        assert 0 < row["median_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["per_s"] > 0 and 0 <= row["right"] <= 1


def test_speculation(tmp_path: Path) -> None:
    small = ["--hidden", "128", "--layers", "1", "--prompts", "2", "--max-tokens", "40", "--warm", "1", "--rounds", "1"]
    rows = rows_of("speculation", tmp_path, *small)
    assert [row["method"] for row in rows][:2] == ["none", "ngram"]
    assert rows[0]["ratio"] == 1 and all(row["same"] == 1 and row["rollout_s"] > 0 for row in rows)


def test_step(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL, the compared package, is not installed")
    rows = rows_of("step", tmp_path, "--quick", "--threads", "1")
    assert [row["system"] for row in rows] == ["oblr_pooled", "trl_grpo", "trl_rloo"]
    assert min(row["ratio_to_trl"] for row in rows[1:]) == 1.0, "one round: the faster trainer of TRL is the base"
    assert all(row["seconds"] > 0 and row["samples"] == 64 for row in rows)


def test_real_model(tmp_path: Path) -> None:
    """The gradients of the first arms have equal samples, microbatches and coefficients; the model has no task."""
    pytest.importorskip("trl", reason="TRL, the compared package, is not installed")
    rows = rows_of("real_model", tmp_path, "--quick", "--threads", "1", "--dtypes", "float32")
    arms = [("gradient", arm) for arm in ("transformers", "exact norms", "keep 0.5")]
    arms += [("step", "trl_grpo"), ("step", "oblr_pooled"), ("rollout", "oblr_pooled")]
    assert [(row["part"], row["arm"]) for row in rows] == arms
    assert rows[0]["ratio"] == rows[3]["ratio"] == 1 and all(row["responses"] == 16 for row in rows)
    assert rows[0]["tokens_per_s"] * rows[0]["seconds"] == pytest.approx(
        rows[1]["tokens_per_s"] * rows[1]["seconds"]
    ), "both arms read the same tokens"
    assert 0 < rows[5]["seconds"] < rows[4]["seconds"] and rows[5]["tokens_per_s"] > 0


def test_step_ratios_are_to_the_faster_of_trl_in_each_round() -> None:
    times = {"oblr_pooled": [1.0, 2.0, 9.0], "trl_grpo": [2.0, 8.0, 3.0], "trl_rloo": [4.0, 4.0, 4.0]}
    work = Work(shape="demo", directory="", num_prompts=4, group_size=2, num_steps=6, num_threads=1)
    ours, grpo, rloo = step.rows_of(times, work, 1)
    assert (ours.ratio_to_trl, grpo.ratio_to_trl, rloo.ratio_to_trl) == (0.5, 1.0, 4 / 3)
    assert (ours.seconds, ours.fastest, ours.slowest, ours.samples, ours.rounds) == (2.0, 1.0, 9.0, 8, 3)


def test_a_system_of_trl_must_be_chosen() -> None:
    with pytest.raises(SystemExit):
        step.parse_options(["--systems", "oblr_pooled"])
