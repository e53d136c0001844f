"""Presets: what each one sets, that given keys win, that a saved config is read back, and what they exclude."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oblr_megatron.algo.formulas import FORMULAS
from oblr_megatron.config import Config, parse_config
from oblr_megatron.config.algo import PRESETS, AlgoConfig, PresetName
from oblr_megatron.errors import UserError

# preset -> baseline, aggregation, schedule: as published
PUBLISHED = {
    "oblr_pooled": ("pooled", "constant", "constant"),
    "oblr_tempered": ("pooled", "constant", "constant"),
    "oblr_po": ("optimal", "constant", "snr"),
    "opo": ("opo", "constant", "constant"),
    "grpo": ("grpo", "sample_mean", "constant"),
    "dr_grpo": ("group_mean", "constant", "constant"),
    "rloo": ("rloo", "constant", "constant"),
    "reinforce_pp": ("reinforce_pp", "token_mean", "constant"),
    "dapo": ("grpo", "token_mean", "constant"),
    "gspo": ("grpo", "sample_mean", "constant"),
    "cispo": ("grpo", "token_mean", "constant"),
}
# preset -> updates_per_batch, ratio, surrogate, clip_low, clip_high: as published
CLIPPED = {
    "dapo": (16, "token", "ppo", 0.2, 0.28),
    "gspo": (4, "sequence", "ppo", 3e-4, 4e-4),
    "cispo": (16, "token", "cispo", None, 4.0),
}


def parsed(*overrides: str, **algo: Any) -> Config:
    table = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algo": algo}
    return parse_config(table, "here", list(overrides))


def test_every_preset_is_listed() -> None:
    assert set(PUBLISHED) == set(PRESETS) == set(PresetName.__args__)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_what_a_preset_sets(preset: str) -> None:
    algo = parsed(f"algo.preset={preset}").algo
    assert (algo.baseline, algo.aggregation, algo.schedule) == PUBLISHED[preset]
    assert algo.norm_power == 0.25 * (preset == "oblr_tempered")
    assert algo.preset == preset and algo.baseline in FORMULAS


@pytest.mark.parametrize("preset", CLIPPED)
def test_what_a_clipped_preset_sets(preset: str) -> None:
    algo = parsed(f"algo.preset={preset}").algo
    found = (algo.updates_per_batch, algo.ratio, algo.surrogate, algo.clip_low, algo.clip_high)
    assert found == CLIPPED[preset] and algo.clips
    assert parsed(f"algo.preset={preset}", "algo.updates_per_batch=1").algo.clips, "on-policy, nothing is clipped"


def test_the_default_is_the_preset_oblr_pooled() -> None:
    without, ours = parsed().algo, parsed("algo.preset=oblr_pooled").algo
    assert without.preset is None and without == ours.model_copy(update={"preset": None})


def test_the_papers_schedule() -> None:
    config = parsed("algo.preset=oblr_po")
    snr = config.algo.snr
    assert config.token_scale == 1, "the unit of the theorems"
    assert (snr.estimator, snr.horizon, snr.warmup_steps, snr.exponent, snr.reference) == ("plugin", 1, 0, 1, "one")
    assert snr.floor <= 1e-6 and snr.max_change >= 1e6  # neither clamps


@pytest.mark.parametrize("preset", PUBLISHED)
def test_given_keys_win(preset: str) -> None:
    given = {"preset": preset, "baseline": "opo", "schedule": "cosine", "snr": {"horizon": 7.0}}
    algo = parsed(**given).algo
    assert (algo.baseline, algo.schedule, algo.snr.horizon) == ("opo", "cosine", 7.0)
    assert algo.aggregation == PUBLISHED[preset][1]
    recipe = PRESETS[preset].get("snr", {})
    assert all(getattr(algo.snr, name) == value for name, value in recipe.items() if name != "horizon")


def test_the_command_line_wins_over_the_file() -> None:
    assert parsed("algo.baseline=rloo", "algo.snr.floor=0.5", preset="oblr_po").algo.snr.floor == 0.5
    assert parsed("algo.preset=grpo", "algo.baseline=opo", baseline="rloo").algo.baseline == "opo"


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_on_the_command_line_is_the_method_that_trains(preset: str) -> None:
    """Whatever the file's method is. Keys that are no part of a method stay."""
    one_update = f"algo.preset={preset}", "algo.updates_per_batch=1"
    own = {"pool_decay": 0.5, "snr": {"num_folds": 8, "horizon": 20.0}}
    method = {"baseline": "optimal", "norm_power": 0.25, "schedule": "cosine", "aggregation": "token_mean"}
    expected = parsed(*one_update, **own | {"snr": own["snr"] | PRESETS[preset].get("snr", {})})
    assert parsed(*one_update, **own, **method) == expected


@pytest.mark.parametrize("preset", CLIPPED)
def test_a_preset_on_the_command_line_has_no_dual_clip_of_the_file(preset: str) -> None:
    assert parsed(f"algo.preset={preset}", preset="dapo", clip_dual=3.0).algo.clip_dual is None
    kept = parsed("algo.preset=dapo", "algo.clip_dual=3", preset="gspo", clip_dual=2.0).algo.clip_dual
    assert kept == parsed(preset="dapo", clip_dual=3.0).algo.clip_dual == 3


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_on_the_command_line_replaces_that_of_a_saved_run(preset: str) -> None:
    """config.json holds every key, and given keys win. Those that no recipe sets stay."""
    for before in ("oblr_tempered", "oblr_po", "dapo"):
        saved = parsed("algo.pool_decay=0.5", "algo.snr.num_folds=8", preset=before).model_dump(mode="json")
        found = parse_config(saved, "config.json", [f"algo.preset={preset}", "algo.clip_high=0.1"]).algo
        assert found == parsed("algo.pool_decay=0.5", "algo.snr.num_folds=8", "algo.clip_high=0.1", preset=preset).algo


@pytest.mark.parametrize("preset", PUBLISHED)
def test_what_a_run_saves_is_read_back(preset: str) -> None:
    config = parsed(f"algo.preset={preset}", "algo.snr.floor=0.25")
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert AlgoConfig.model_validate(config.algo.model_dump()) == config.algo


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algo.preset=grpoo"], "algo.preset = 'grpoo'"),
        (["algo.preset=rloo", "group_size=1"], "baseline 'rloo'"),
        (["algo.preset=oblr_pooled", "algo.kl_coefficient=0.04", "gradnorm.mode=bookkeep"], "algo.kl_coefficient 0.04"),
        (["algo.preset=oblr_po", "algo.kl_coefficient=0.04", "gradnorm.mode=stash"], "gradnorm.mode 'stash'"),
        (["algo.preset=oblr_tempered", "gradnorm.mode=inline"], "algo.norm_power 0.25 reads norms of its own step"),
        (["algo.preset=oblr_tempered", "gradnorm.sample_fraction=0.5"], "algo.norm_power 0.25 reads every norm"),
        (["algo.preset=grpo", "algo.norm_power=0.25", "algo.updates_per_batch=2"], "with algo.norm_power 0.25"),
        (["algo.preset=oblr_tempered", "algo.keep=0.5"], "leaves out responses, but algo.norm_power 0.25"),
        (["algo.preset=oblr_po", "algo.keep=0.5"], "algo.keep 0.5 leaves out responses, but algo.baseline 'optimal'"),
        (["algo.keep=0.5", "gradnorm.mode=stash"], "algo.keep 0.5 leaves out single responses, but stash"),
        (["algo.keep=0.5", "gradnorm.sample_fraction=0.5"], "but gradnorm.sample_fraction below 1"),
        (["algo.keep=0.5", "algo.preset=dapo"], "but algo.updates_per_batch above 1"),
        (["algo.keep=0.5", "algo.kl_coefficient=0.1"], "but the KL penalty"),
        (["algo.keep=0.5", "rollout.overlap=stream"], "but rollout.overlap"),
        (["algo.keep=0"], "algo.keep = 0"),
        (["algo.norm_power=0.6"], "algo.norm_power = 0.6"),
        (["algo.preset=dapo", "num_prompts=120"], "algo.updates_per_batch 16 does not divide num_prompts 120"),
        (["algo.preset=dapo", "num_prompts=32"], "leaves 2 prompts for each update"),
        (["algo.preset=dapo", "algo.baseline=pooled"], "algo.updates_per_batch 16 with algo.baseline 'pooled'"),
        (["algo.preset=gspo", "gradnorm.always=true"], "algo.updates_per_batch 4 with gradnorm.always"),
        (["algo.preset=gspo", "algo.schedule=snr"], "algo.schedule 'snr'"),
        (["algo.preset=cispo", "rollout.overlap=stream"], "rollout.overlap 'stream'"),
        (["algo.preset=cispo", "rollout.overlap=one_step", "rollout.max_staleness=1"], "rollout.overlap 'one_step'"),
        (["algo.preset=cispo", "algo.clip_dual=3"], "algo.clip_dual"),
        (["algo.baseline=rloo", "algo.clip_high=0.2"], "algo.updates_per_batch is 1"),
        (["algo.baseline=rloo", "algo.ratio=sequence"], "algo.updates_per_batch is 1"),
    ],
)
def test_contradictions_end_in_one_line(overrides: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(*overrides)
    assert named in str(caught.value) and "\n" not in str(caught.value) and caught.value.fix
