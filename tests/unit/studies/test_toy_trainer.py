"""The toy trainer: complete records, the same run from the same seed, errors before anything is written."""

import json
from pathlib import Path

import pytest

from oblr_megatron.config import OptimizerConfig, validated
from oblr_megatron.config.algo import PRESETS, AlgoConfig
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import read_metrics
from studies.start import prepare
from studies.toy_trainer import ToyConfig, ToyRun, prompt_order, run_toy


def config_of(start: Path, run_dir: Path, rival: str = "none", **algo: object) -> ToyConfig:
    return ToyConfig(
        task="brackets",
        start_dir=start,
        run_dir=run_dir,
        seed=3,
        num_steps=4,
        num_prompts=4,
        group_size=4,
        evaluate_every=2,
        evaluation_samples=1,
        rival=rival,
        algo=AlgoConfig.model_validate(algo),
        optimizer=OptimizerConfig(lr=1e-3),
    )


def untimed(run_dir: Path) -> list[dict[str, float | None]]:
    return [{k: v for k, v in record.items() if not k.startswith("timing_s")} for record in read_metrics(run_dir)]


@pytest.mark.parametrize(
    "algo",
    [{}, {"preset": "grpo", "kl_coefficient": 0.1}],
    ids=["default", "grpo with KL"],
)
def test_the_same_seed_gives_the_same_run(start: Path, tmp_path: Path, algo: dict[str, object]) -> None:
    for name in ("a", "b"):
        run_toy(config_of(start, tmp_path / name, **algo))
    first = untimed(tmp_path / "a")
    assert first == untimed(tmp_path / "b")
    assert [record["step"] for record in first] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in first if "eval/brackets/mean_at_k" in record] == [0, 2, 4]
    assert all(record["lr"] > 0 and record["entropy"] > 0 for record in first[1:])


def test_every_preset_makes_another_update(start: Path, tmp_path: Path) -> None:
    """All start from the same samples; at the end no two presets have the same gradient norm."""
    norms = {}
    for preset, recipe in PRESETS.items():
        if "updates_per_batch" in recipe:
            with pytest.raises(UserError) as caught:
                run_toy(config_of(start, tmp_path / preset, preset=preset))
            assert caught.value.where == "algo.updates_per_batch"
            continue
        run_toy(config_of(start, tmp_path / preset, preset=preset).model_copy(update={"num_steps": 2}))
        norms[preset] = read_metrics(tmp_path / preset)[-1]["grad_norm"]
    assert len(set(norms.values())) == len(norms), norms


def test_prompts_come_in_shuffled_passes_that_depend_on_the_seed_only(start: Path, tmp_path: Path) -> None:
    config = config_of(start, tmp_path)
    order = prompt_order(8, config)
    assert order == prompt_order(8, config.model_copy(update={"group_size": 2})) and len(order) == 4
    assert sorted(order[0] + order[1]) == list(range(8)) == sorted(order[2] + order[3])
    assert order != prompt_order(8, config.model_copy(update={"seed": 4}))
    all_rows = ToyRun(config).train
    assert ToyRun(config.model_copy(update={"train_rows": 8})).train == all_rows[:8] and len(all_rows) == 4096


def test_a_start_is_reused_unless_its_settings_differ(tmp_path: Path) -> None:
    first = prepare("sums", "low", tmp_path, steps=2)
    stamp = (first / "model" / "model.safetensors").stat().st_mtime_ns
    assert prepare("sums", "low", tmp_path, steps=2) == first
    assert (first / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    prepare("sums", "low", tmp_path, steps=3)
    assert (first / "model" / "model.safetensors").stat().st_mtime_ns != stamp
    weights = (first / "model" / "model.safetensors").read_bytes()
    prepare("sums", "low", tmp_path, steps=3, seed=1)
    assert (first / "model" / "model.safetensors").read_bytes() != weights
    with pytest.raises(UserError, match=r"'sum' \[task\]"):
        prepare("sum", "low", tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "chess"}, "'chess' [task]"),
        ({"num_prompts": 5}, "num_prompts 5"),
        ({"temprature": 1.0}, "temprature"),
        ({"start_dir": "/nowhere"}, "[/nowhere]"),
        ({"algo": {"baseline": "best"}}, "baseline"),
        ({"rival": "otb"}, "replaces algo.baseline 'pooled'"),
        ({"rival": "otb", "algo": {"baseline": "none"}, "group_size": 1}, "'otb' needs other responses"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    start: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    table = json.loads(config_of(start, tmp_path / "run").model_dump_json()) | change
    with pytest.raises(UserError) as caught:
        run_toy(validated(ToyConfig, table, "config"))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
