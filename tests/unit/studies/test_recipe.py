"""Tasks that are the config of a training run: what a study copies, asks of each backend, and refuses.

A run of TRL is compared with the prompts of a training run, and with greedy decoding of single prompts by transformers.
Not covered: a run of the backend "train" (tests/e2e/test_study_recipe.py).
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from oblr_megatron.config import parse_config
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.metrics import read_metrics
from studies.curves import Curves
from studies.plan import load_plan
from studies.recipe import prepare_recipe
from studies.rows import start_digest
from studies.toy_trainer import ToyConfig
from studies.train_backend import train_table
from studies.trl_recipe import check_settings
from tests.unit.studies.runs import key_of, prompts_asked_of_trl, recipe_plan, write_recipe


def config_of(recipe: Path, tmp_path: Path, arm: str = "trl_grpo", **changes: object) -> ToyConfig:
    """The config of a run, from a start without the original files."""
    path = tmp_path / "plan.toml"
    path.write_text(recipe_plan(recipe))
    plan, out = load_plan(path), tmp_path / "out"
    start = prepare_recipe("words", recipe, out / "start")
    study = Curves(plan, out, {"words": start}, processes=1)
    return ToyConfig.model_validate(study.job(key_of("words", arm, 1e-3, 0, (4, 4))).config | changes)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def test_a_run_needs_the_start_alone(recipe: Path, tmp_path: Path) -> None:
    toy = config_of(recipe, tmp_path, "lora")
    for name in ("model", "rows.jsonl", "kept.jsonl"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    run, start = parse_config(json.loads(json.dumps(train_table(toy)))), tmp_path / "out/start/words"
    assert run.model.path == start / "model" and (start / "model/config.json").exists()
    assert (start / "train.jsonl").read_text() == (tmp_path / "moved-rows.jsonl").read_text()
    (name, held_out), (train,) = *run.evaluate.data.items(), run.data.train
    assert (name, held_out.path, train.path) == ("words", str(start / "heldout.jsonl"), str(start / "train.jsonl"))
    assert (run.num_steps, run.num_prompts, run.group_size, run.optimizer.lr) == (2, 4, 4, 1e-3)
    assert (run.rollout.max_response_tokens, run.data.max_prompt_tokens, run.evaluate.samples_per_prompt) == (6, 8, 2)
    assert run.reward.name.endswith("reward.py:ones") and not run.checkpoint.export_hf
    model = run.model  # of the recipe, the plan, the arm
    assert (model.dtype, model.make_vocab_size_divisible_by, model.lora.rank) == ("float32", 4, 4)
    assert prepare_recipe("words", recipe, start.parent) == start


def test_a_start_is_its_weights_and_its_rows(recipe: Path, tmp_path: Path) -> None:
    start = prepare_recipe("words", recipe, tmp_path / "start")
    digest = start_digest(start)
    start_digest.cache_clear()
    (start / "train.jsonl").write_text((start / "train.jsonl").read_text() + "\n")
    assert start_digest(start) != digest
    with pytest.raises(UserError, match=r"rows\.jsonl has changed"):
        prepare_recipe("words", recipe, tmp_path / "start")


def test_bad_recipes_are_refused(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text()
    prepare_recipe("words", recipe, tmp_path / "start")
    (longer := tmp_path / "longer.toml").write_text(text.replace("response_tokens = 6", "response_tokens = 7"))
    (none := tmp_path / "none.toml").write_text(text.replace(f'kept = "{tmp_path}/kept.jsonl"', ""))
    (uneven := tmp_path / "uneven.toml").write_text(text.replace("[rollout]", "[rollout]\ndynamic_sampling = true"))
    for path, named in (
        (longer, "has changed"),
        (none, "evaluate.data has 0 sets"),
        (uneven, "rollout.dynamic_sampling draws"),
    ):
        with pytest.raises(UserError, match=named):
            prepare_recipe("words", path, tmp_path / "start")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(UserError, match=r"the recipe names .*model, which is missing"):
        prepare_recipe("other", recipe, tmp_path / "start")


@pytest.mark.parametrize("key", ["rollout.top_p", "rollout.top_k", "rollout.min_p", "model.lora"])
def test_settings_that_trl_lacks_are_refused(recipe: Path, tmp_path: Path, key: str) -> None:
    table = train_table(config_of(recipe, tmp_path))
    check_settings(parse_config(table), "words")
    value = {"rollout.top_k": "=16", "model.lora": ".rank=4"}.get(key, "=0.5")
    with pytest.raises(UserError, match=f"no {key}"):
        check_settings(parse_config(table, "here", [key + value]), "words")


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL, the peer, is not installed")
def test_a_response_without_a_reward_ends_a_run_of_trl(recipe: Path, tmp_path: Path) -> None:
    """TRL cannot leave one out; a reward of 0 would be wrong. Held-out answers are t2 and t3."""
    from studies import trl_backend

    (tmp_path / "reward.py").write_text("def ones(response, answer):\n    return 1 / (answer in ('t2', 't3'))\n")
    with pytest.raises(RunError, match=r"a response got no reward: .*ZeroDivisionError"):
        trl_backend.run_trl(config_of(recipe, tmp_path), "grpo")


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL, the peer, is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trl_trains_on_a_training_runs_prompts(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from studies import trl_backend

    config, asked = config_of(write_recipe(tmp_path, dtype), tmp_path), prompts_asked_of_trl(monkeypatch)
    trl_backend.run_trl(config, "grpo")
    run, path = parse_config(train_table(config)), config.start_dir / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    stream = PromptStream(run.data, tokenizer, seed=config.seed, held_out=run.evaluate.data)
    wanted = [prompt.token_ids for prompt in stream.next_prompts(8) for _ in range(4)]
    assert [ids for prompts in asked for ids in prompts] == wanted
    records = read_metrics(config.run_dir)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(0 < record["eval/words/mean_at_k"] < 1 for record in records)
    assert all(record["grad_norm"] > 0 and record["lr"] == 1e-3 for record in records[1:])
    if dtype == "float32":
        model, right = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), list[bool]()
        for line in (config.start_dir / "heldout.jsonl").read_text().splitlines():
            ids = tokenizer(json.loads(line)["question"], return_tensors="pt")["input_ids"]
            response = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0)
            text = tokenizer.decode(response[0, ids.shape[1] :], skip_special_tokens=True)
            right.append(text.count("t1") >= 2)
        assert records[0]["eval/words/accuracy"] == pytest.approx(sum(right) / 12) and 0 < sum(right) < 12
