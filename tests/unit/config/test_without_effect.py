"""Options that are set but turned off are named, and only these."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from oblr_megatron.config import Config, parse_config
from oblr_megatron.config.without_effect import TURNED_OFF, without_effect

MINIMAL: dict[str, Any] = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
# key -> what turns it on
TURNED_ON = {
    "rollout.wave_tokens=9": ["rollout.overlap=stream"],
    "rollout.speculation_below=9": ["rollout.speculation=ngram"],
    "reward.send_rows=true": ["reward.terms=[{name='http://a:1'}]"],
    "reward.overlong_buffer_tokens=9": ["reward.terms=[{name='overlong'}]"],
    "rollout.environment.tool_workers=5": ["rollout.environment.function=tool_loop", "rollout.environment.tools=a:f"],
    "algo.pool_decay=0.5": ["algo.baseline=pooled"],
    "algo.snr.max_change=2.0": ["algo.schedule=snr"],
    "optimizer.sgd_momentum=0.5": ["optimizer.name=sgd"],
    "gradnorm.sample_fraction=0.5": ["algo.baseline=pooled"],
    "parallel.recompute_modules=mlp": ["parallel.recompute_granularity=selective"],
    "log.run_name=mine": ["log.trackers=wandb"],
}


def parsed(*overrides: str) -> Config:
    return parse_config(MINIMAL, overrides=["algo.baseline=none", *overrides])


def test_the_defaults_have_an_effect() -> None:
    assert list(without_effect(parse_config(MINIMAL))) == list(without_effect(parsed())) == []


@pytest.mark.parametrize("option", TURNED_ON)
def test_an_option_that_is_turned_off_is_named(option: str) -> None:
    section, _, key = option.partition("=")[0].rpartition(".")
    cause = next(cause for name, keys, cause, _ in TURNED_OFF if name == section and key in keys)
    assert list(without_effect(parsed(option))) == [f"{section}.{key} has no effect: {cause}"]
    assert not list(without_effect(parsed(*TURNED_ON[option], option)))


def test_every_listed_option_exists() -> None:
    for section, keys, _, off in TURNED_OFF:
        assert set(keys) <= set(type(attrgetter(section)(parsed())).model_fields) and isinstance(off(parsed()), bool)
