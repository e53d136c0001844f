"""The configuration of an evaluation: of a run's settings it takes those that its own engine can follow."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oblr_megatron.checkpoint.hf_dir import HFDir, check_hf_dir
from oblr_megatron.checks import machine
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.setup import check_engine, config_of
from oblr_megatron.model.published import published
from tests.tiny import make_hf_dir


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The config of a run with servers that computes gradients while they sample."""
    model = make_hf_dir(tmp_path_factory.mktemp("setup") / "model", head_dim=32)
    run = {
        "run_dir": "run",
        "model": {"path": "elsewhere"},
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 24},
        "rollout": {"servers": ["http://h:1"], "overlap": "stream", "quantization": "fp8", "dtype": "bfloat16"},
    }
    run["rollout"] |= {"max_response_tokens": 40}
    (model.parent / "config.json").write_text(json.dumps(run))
    options: Any = SimpleNamespace(config=model.parent / "config.json", overrides=[])
    return config_of(options, check_hf_dir(model), {})


def test_a_path_may_have_any_character(tmp_path: Path) -> None:
    """Overrides are TOML, which knows no surrogates."""
    model = HFDir(tmp_path / "\N{ROCKET}\N{CJK UNIFIED IDEOGRAPH-20BB7}", {}, (), {}, tied=False, num_bytes=0)
    options: Any = SimpleNamespace(config=None, overrides=[])
    assert config_of(options, model, {}).model.path == model.path


def test_an_engine_on_a_cpu_needs_a_cache_for_the_longest_sequence(tmp_path: Path) -> None:
    path = make_hf_dir(tmp_path / "model", head_dim=32, max_position_embeddings=40_000)
    options: Any = SimpleNamespace(config=None, overrides=["evaluate.max_response_tokens=32768"])
    config = config_of(options, check_hf_dir(path), {"rollout.kv_cache_gib": 0.001})
    with pytest.raises(UserError, match="KV cache holds"):
        check_engine(config, check_hf_dir(path))


def test_nothing_is_trained_meanwhile(config: Config) -> None:
    """On GPUs engine and trainer would take turns without servers, which overlap "stream" refuses.

    The engine has a GPU alone, and one engine holds what several of the run shared.
    """
    assert config.rollout.servers == () and config.rollout.overlap == "none"
    assert config.rollout.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(("value", "dtype"), [(None, "auto"), ({"quant_method": "modelopt"}, "bfloat16")])
def test_only_quantized_weights_decide_the_engines_dtype(tmp_path: Path, value: Any, dtype: str) -> None:
    model = HFDir(tmp_path, {"quantization_config": value}, (), {}, tied=False, num_bytes=0)
    options: Any = SimpleNamespace(config=None, overrides=[])
    assert config_of(options, model, {}).rollout.dtype == dtype


def test_a_runs_own_keys_do_not_refuse_an_evaluation(tmp_path: Path) -> None:
    """The weights of a quantized directory are rounded already; nothing is saved, so nothing is the best."""
    model = HFDir(tmp_path, {"quantization_config": {"quant_method": "modelopt"}}, (), {}, tied=False, num_bytes=0)
    run = {
        "run_dir": "run",
        "model": {"path": "model", "dtype": "bfloat16"},
        "data": {"train": "rows.jsonl"},
        "rollout": {"quantization": "fp8", "importance_sampling": "token", "gpu_memory_utilization": 0.7},
        "checkpoint": {"best_metric": "eval/held/mean_at_k"},
        "evaluate": {"data": {"held": "held.jsonl"}, "every_steps": 1, "samples_per_prompt": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(run))
    options: Any = SimpleNamespace(config=tmp_path / "config.json", overrides=[])
    given = config_of(options, model, {"evaluate.samples_per_prompt": 0})
    assert (given.rollout.quantization, given.checkpoint.best_metric) == ("none", "")
    assert given.rollout.gpu_memory_utilization == 0.9, "in the run the engine shared its GPU with the trainer"
    options.overrides = ["rollout.gpu_memory_utilization=0.3"]
    assert config_of(options, model, {}).rollout.gpu_memory_utilization == 0.3


@pytest.mark.parametrize(
    "override",
    ["rollout.tensor_parallel_size=4", "rollout.num_engines = 2", "parallel.tensor_model_parallel_size=2"],
)
def test_what_one_engine_cannot_follow_is_refused_on_the_command_line(override: str, tmp_path: Path) -> None:
    model = HFDir(tmp_path, {}, (), {}, tied=False, num_bytes=0)
    options: Any = SimpleNamespace(config=None, overrides=["seed=1", override])
    with pytest.raises(UserError, match="no effect") as caught:
        config_of(options, model, {})
    assert caught.value.where == override
    options.overrides = ["rollout.tensor_parallel_size=1"]
    assert config_of(options, model, {}).rollout.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("size", "quantized", "fits"), [("8B", False, True), ("32B", False, False), ("32B", True, True)]
)
def test_a_model_that_is_too_large_for_a_gpu_is_refused(
    size: str, quantized: bool, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an engine loads it for minutes. 32B in bf16 take 66 of 72 GB, and a cache of 33k tokens 9 more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    for name in ("check_head_size", "build_problem", "refuse"):
        monkeypatch.setattr(machine, name, lambda *_, **__: "")
    own = {"quantization_config": {"quant_method": "modelopt"}} if quantized else {}
    model = HFDir(tmp_path, published(size) | own, (), {}, tied=False, num_bytes=0)
    options: Any = SimpleNamespace(config=None, overrides=["rollout.max_response_tokens=32768", "model.dtype=bfloat16"])
    with nullcontext() if fits else pytest.raises(UserError, match="KV cache holds") as caught:
        check_engine(config_of(options, model, {}), model)
    if not fits:
        assert "tensor_parallel" not in caught.value.fix and "dtype" not in caught.value.fix
        options.overrides = []
        with pytest.raises(UserError, match=r"set rollout\.dtype=bfloat16"):
            check_engine(config_of(options, model, {}), model)
