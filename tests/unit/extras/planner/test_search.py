"""The search: every plan passes a run's own checks and fits, and the fastest comes first; the `plan` command."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.cli import main, make_parser
from oblr_megatron.config import load_config, parse_config
from oblr_megatron.errors import EXIT_USER, UserError
from oblr_megatron.extras.planner.constants import PlannerMachine
from oblr_megatron.extras.planner.plan_command import request_of
from oblr_megatron.extras.planner.search import KEEP_FREE, SearchResult, powers, search
from oblr_megatron.extras.planner.setting import Request, base_table
from oblr_megatron.extras.planner.table import unset
from oblr_megatron.memory.engine import CONTEXT, engine_bytes
from oblr_megatron.memory.pass_plan import longest_sample
from oblr_megatron.model.published import published
from oblr_megatron.observe.performance.hardware import device_named
from oblr_megatron.preflight.device_memory import RankDevice, rank_memory

GB = 10**9


def request(model: str = "Qwen3-8B", gpus: int = 8, gb: int = 80, **sizes: int) -> Request:
    options = {"prompts": 32, "group_size": 8, "prompt_tokens": 512, "sequence_length": 4096} | sizes
    table = base_table(model=model, dtype="bfloat16", **options)
    device = replace(device_named("h100"), memory_gb=gb)
    return Request(model, published(model), gpus, PlannerMachine(device), 1024, table)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(request())


def test_plans_pass_the_checks_of_a_run_and_fit(found: SearchResult) -> None:
    asked = request()
    assert len(found.plans) > 20
    for plan in found.plans:
        config = asked.config(plan.sections)
        check_layout(asked.hf_config, config, asked.gpus)
        assert config == plan.config and plan.peak_bytes <= 80 * GB - KEEP_FREE
        engine = engine_bytes(asked.hf_config, config, device_bytes=asked.machine.device.memory_bytes)
        assert engine.kv_tokens >= longest_sample(config)
        assert config.parallel.tensor_model_parallel_size <= 8


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"name": "sgd"}, "parallel": {"account_for_embedding_and_loss": True}},
        {
            "rollout": {"num_engines": 8},
            "parallel": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
        },
    ],
    ids=["optimizer and stages", "engines and virtual stages"],
)
def test_keys_of_a_config_leave_the_layouts_that_they_allow(keys: dict[str, dict[str, Any]]) -> None:
    asked = request()
    sections = {name: asked.table.get(name, {}) | more for name, more in keys.items()}
    plans = search(replace(asked, table=asked.table | sections)).plans
    sizes = {plan.config.parallel.pipeline_model_parallel_size for plan in plans}
    assert {1, 2} <= sizes and any(plan.config.parallel.context_parallel_size > 1 for plan in plans)
    if "rollout" in keys:
        assert {plan.config.rollout.tensor_parallel_size for plan in plans} == {1}


def test_memory_is_what_a_dry_run_counts(found: SearchResult) -> None:
    """Both phases of the fullest rank. The dry run adds the trainer's context, which the planner keeps free."""
    asked = request()
    gpu = RankDevice(on_gpu=True, num_bytes=asked.machine.device.memory_bytes, transformer_engine=True)
    for plan in found.plans:
        ranks = rank_memory(asked.hf_config, plan.config, asked.gpus, gpu)
        assert plan.training_bytes == max(rank.training for rank in ranks) - CONTEXT, plan.name
        assert plan.rollout_bytes == max(rank.rollout for rank in ranks) - CONTEXT, plan.name


def test_the_fastest_comes_first_and_layouts_differ(found: SearchResult) -> None:
    seconds = [plan.prediction.seconds for plan in found.plans]
    assert seconds == sorted(seconds) and seconds[-1] > 1.2 * seconds[0]
    assert len({plan.name for plan in found.plans}) == len(found.plans)
    assert len({plan.config.gradnorm.mode for plan in found.plans}) > 1
    assert {plan.config.optimizer.offload for plan in found.plans} == {"none", "sampling"}


def test_replicas_hold_whole_folds(found: SearchResult) -> None:
    for plan in found.plans:
        parallel, folds = plan.config.parallel, plan.config.algo.snr.num_folds
        replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        assert folds % (8 // (replica * parallel.context_parallel_size)) == 0 and 32 % folds == 0


def test_less_memory_leaves_fewer_plans(found: SearchResult) -> None:
    small = search(request(gb=40))
    assert len(small.plans) < len(found.plans) and small.too_large > found.too_large


def test_the_error_says_how_much_is_missing() -> None:
    with pytest.raises(UserError, match=r"\(TP\d PP\d .*offload\) needs \d+ GiB per GPU, \d+ GiB too much"):
        search(request("Qwen3-32B", gpus=2))


def test_the_engine_holds_the_longest_evaluated_sequence() -> None:
    """0.6B leaves a cache of some hundred thousand tokens on 24 GB; the response of an evaluation exceeds it."""
    asked = request("Qwen3-0.6B", gpus=1, gb=24)
    asked = replace(asked, hf_config={**asked.hf_config, "max_position_embeddings": 10**7})
    assert search(asked).plans
    with pytest.raises(UserError, match="too little for a vLLM engine"):
        search(replace(asked, table={**asked.table, "evaluate": {"max_response_tokens": 10**6}}))


def test_too_long_for_the_model() -> None:
    with pytest.raises(UserError, match="exceeds the model's max_position_embeddings 40960"):
        search(request(sequence_length=65536))


def test_powers() -> None:
    assert [powers(most) for most in (1, 2, 7, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


RUN = """
run_dir = "runs/x"
num_prompts = 8
group_size = 4
model = { path = "somewhere", dtype = "bfloat16" }
data = { train = "train.jsonl", max_prompt_tokens = 100 }
rollout = { max_response_tokens = 400 }
"""
ASK = ["plan", "--model", "Qwen3-0.6B", "--gpus", "2", "--sequence-length", "2048", "--prompts", "16"]


def test_command_prints_json_and_writes_sections_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.toml"
    assert main([*ASK, "--top", "2", "--json", "--write", str(file)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["gpus"] == 2 and len(record["plans"]) == 2
    first = record["plans"][0]
    assert first["step_s"] == pytest.approx(sum(phase["s"] for phase in first["phases"].values()))
    sections = tomllib.loads(file.read_text())
    assert sections == first["sections"]
    table = base_table(model="x", prompts=16, group_size=8, prompt_tokens=256, sequence_length=2048, dtype="bfloat16")
    run = parse_config({**table, **{name: {**table.get(name, {}), **fields} for name, fields in sections.items()}})
    check_layout(published("Qwen3-0.6B"), run, 2)


def test_command_reads_the_rest_of_a_run_from_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN + 'algo = { baseline = "rloo", snr = { num_folds = 8 } }\n')
    command = ["plan", "--model", "Qwen3-0.6B", "--gpus", "2", "--config", str(tmp_path / "run.toml"), "--json"]
    assert main(command) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {plan["sections"]["algo"]["snr"]["num_folds"] for plan in plans} == {8}
    assert all(plan["phases"]["norms"]["s"] == 0 for plan in plans)
    layouts = [{**plan["sections"], "algo": None} for plan in plans]
    assert all(layouts.count(one) == 1 for one in layouts), "norm modes that measure nothing are no other layouts"
    assert len({plan["layout"] for plan in plans}) == len(plans) > 5 and "gradnorm" not in layouts[0]
    saved, best = tmp_path / "config.json", tmp_path / "best.toml"
    saved.write_text(json.dumps(load_config(tmp_path / "run.toml").model_dump(mode="json")))
    assert main([*command[:-2], str(saved), "--json", "--write", str(best)]) == 0
    again = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["layout"] for plan in again] == [plan["layout"] for plan in plans]
    assert tomllib.loads(best.read_text())["algo"]["snr"]["num_folds"] == 8


@pytest.mark.parametrize(("engines", "widths"), [("tensor_parallel_size = 4", {1, 2}), ("num_engines = 2", {2})])
def test_nodes_have_the_given_number_of_gpus(
    engines: str, widths: set[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner chooses the engines' size, also where the config has one that these nodes do not hold."""
    (tmp_path / "run.toml").write_text(RUN.replace("= 400", f"= 400, {engines}"))
    sizes = ["--gpus", "4", "--gpus-per-node", "2", "--config", str(tmp_path / "run.toml"), "--top", "10000", "--json"]
    assert main([*ASK[:3], *sizes]) == 0
    sections = [plan["sections"] for plan in json.loads(capsys.readouterr().out)["plans"]]
    assert {one["rollout"]["tensor_parallel_size"] for one in sections} <= widths
    assert {one["parallel"]["tensor_model_parallel_size"] for one in sections} == {1, 2}


def test_given_options_override_the_config(tmp_path: Path) -> None:
    text = RUN.replace("bfloat16", "float32")
    (tmp_path / "run.toml").write_text(text)
    command = [*ASK[:5], "--config", str(tmp_path / "run.toml")]

    def asked(*more: str) -> tuple[int, int, str, int, int]:
        found = request_of(make_parser().parse_args([*command, *more])).config({})
        sizes = found.data.max_prompt_tokens, found.rollout.max_response_tokens
        return found.num_prompts, found.group_size, found.model.dtype, *sizes

    assert asked() == (8, 4, "float32", 100, 400)
    assert asked("--prompts", "16", "--group-size", "2", "--dtype", "bfloat16") == (16, 2, "bfloat16", 100, 400)
    assert asked("--prompt-tokens", "200") == (8, 4, "float32", 200, 400)
    assert asked("--prompt-tokens", "200", "--sequence-length", "2048") == (8, 4, "float32", 200, 1848)
    with pytest.raises(UserError, match="--sequence-length 100 leaves no response after 100 tokens"):
        asked("--sequence-length", "100")
    for keys in ('overlap = "stream", sleep_level = 0', 'servers = ["http://a:1"]', 'replay = "runs/y/rollouts"'):
        (tmp_path / "run.toml").write_text(text.replace("= 400", f"= 400, {keys}"))
        with pytest.raises(UserError, match="the planner divides the GPUs itself") as caught:
            asked()
        assert "--overlap" in caught.value.fix


def test_table_names_phases_and_what_bounds_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--top", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "layouts fit" in said and "rollout" in said
    assert "Qwen3-0.6B on 2 x h100, 16 x 8 samples: prompts of 256 tokens, responses of 896 (mean)" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "0"], "argument --gpus: '0'"),
        (["--gpu", "abacus"], "unknown device 'abacus'"),
        (["--prompt-tokens", "4096"], "--sequence-length 2048"),
        (["--calibration", "/nowhere.json"], "/nowhere.json"),
        (["--model", "Qwen9"], "no published model"),
    ],
)
def test_mistakes_end_in_one_line(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, *more]) == EXIT_USER
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_file_that_exists_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the file of --config, a directory, a dangling link, and places where no file can be made."""
    config, link, closed = tmp_path / "run.toml", tmp_path / "link", tmp_path / "closed"
    config.write_text("as it was")
    link.symlink_to(tmp_path / "nothing")
    closed.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    monkeypatch.setattr("oblr_megatron.extras.planner.search.search", lambda _: pytest.fail("searched"))
    for file in (config, tmp_path, link, config / "best.toml", closed / "a" / "best.toml"):
        calibrate = ["plan", "--calibrate", str(tmp_path / "no_run"), "--out", str(file)]
        for command in ([*ASK, "--config", str(config), "--write", str(file)], calibrate):
            assert main(command) == EXIT_USER
            said = capsys.readouterr().err
            assert said.startswith("error: cannot write --") and str(file) in said and said.count("\n") == 1
    assert config.read_text() == "as it was" and not list(closed.iterdir())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "model_type None"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768}, "model_type 'gpt2'"),
        ({"run_dir": "run", "num_steps": 3, "model": {"path": "m"}}, "the directory of a run"),
        (published("Qwen3-0.6B") | {"hidden_size": "1024"}, "hidden_size is '1024'"),
        ([], "not a JSON object"),
    ],
)
def test_a_config_json_of_something_else_is_refused(
    config: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), *ASK[3:]]) == EXIT_USER
    error = capsys.readouterr().err
    assert said in error and str(tmp_path / "config.json") in error and error.count("\n") == 1


def test_a_layout_says_which_keys_must_go() -> None:
    sections = {"parallel": {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}}
    before = {"parallel": {"virtual_pipeline_model_parallel_size": 2}}
    assert unset(sections, before) == "# Remove parallel.virtual_pipeline_model_parallel_size from your config.\n"
    assert unset(sections, {}) == unset(sections, sections) == ""
