"""[rollout.vllm]: which options are refused, and how they reach vLLM's command line.

The oracle for names and flags is the installed vLLM's own parser. Not covered: what vLLM does with a value.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from oblr_megatron.checks.vllm_options import (
    OWNED,
    OWNED_ON_CPU,
    check_processor,
    check_vllm_options,
    known_options,
    processor_flags,
    serve_words,
)
from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.serve_command import add_arguments, spec_of
from oblr_megatron.errors import UserError

OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "async_scheduling": True,
    "disable_log_stats": False,
    "block_size": 32,
    "kv_cache_dtype": "fp8",
    "cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
}


def test_every_refused_name_is_one_of_vllms() -> None:
    assert {*OWNED, *OWNED_ON_CPU} <= known_options().keys()
    check_vllm_options(OPTIONS, on_gpu=False)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_we_set_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_vllm_options({name: 1}, on_gpu=True)
    assert caught.value.where == "config: rollout.vllm"
    assert name in caught.value.what and OWNED[name] in caught.value.what


def test_a_cpu_engine_sets_more() -> None:
    for name in OWNED_ON_CPU:
        check_vllm_options({name: None}, on_gpu=True)
        with pytest.raises(UserError):
            check_vllm_options({name: None}, on_gpu=False)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("block_size", "many", "a value of type int | None"),
        ("block_size", True, "a value of type int | None"),
        ("enable_prefix_caching", 1, "a value of type bool | None"),
        ("cudagraph_capture_sizes", [1, "2"], "a value of type list[int] | None"),
        ("scheduling_policy", "sjf", "one of 'fcfs', 'priority'"),
        ("per_request_spec_decode_metrics", "all", "one of 'none', 'summary', 'detailed'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_vllm_takes(name: str, value: Any, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        check_vllm_options({name: value}, on_gpu=True)
    assert caught.value.what == f"the installed vLLM takes no {name} = {value!r}"
    assert caught.value.fix == f"set it to {fix}"


def test_vllms_own_defaults_are_accepted() -> None:
    """The oracle is `EngineArgs`. Defaults that are no values of a config (objects, enums) are left out."""
    from vllm.engine.arg_utils import EngineArgs

    plain = (str, int, float, bool, list, dict, type(None))
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(EngineArgs)
    }
    free = known_options().keys() - OWNED.keys()
    values = {name: value for name, value in defaults.items() if name in free and type(value) in plain}
    check_vllm_options(values, on_gpu=True)
    assert len(values) > 100


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError) as caught:
        check_vllm_options({"enable_prefix_cache": True}, on_gpu=True)
    assert caught.value.fix == "write enable_prefix_caching"


def test_a_server_gets_the_options_as_the_run_names_them() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--model", "models/q", *serve_words(OPTIONS)])
    arguments = vllm_arguments(spec_of(given, "cpu"), "b")
    assert {name: arguments[name] for name in OPTIONS} == OPTIONS


AVX512 = ("avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")


@pytest.mark.parametrize("flags", [AVX512, ("avx2", "amx_tile")])
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache_runs_on_processors_with_its_instructions(
    flags: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oblr_megatron.checks.vllm_options.processor_flags", lambda: frozenset(flags))
    check_processor({"kv_cache_dtype": dtype}, on_gpu=False)


@pytest.mark.parametrize("flags", [(), ("avx2",), AVX512[:-1]])
def test_an_fp8_cache_is_refused_on_other_processors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oblr_megatron.checks.vllm_options.processor_flags", lambda: frozenset(flags))
    with pytest.raises(UserError) as caught:
        check_processor({"kv_cache_dtype": "fp8"}, on_gpu=False, where="--vllm")
    assert caught.value.where == "--vllm" and "fp8" in str(caught.value)
    check_processor({"kv_cache_dtype": "fp8"}, on_gpu=True)
    check_processor({"kv_cache_dtype": "auto"}, on_gpu=False)


def test_the_flags_are_those_that_torch_finds() -> None:
    import torch

    flags = processor_flags()
    assert ("avx2" in flags) == torch.cpu._is_avx2_supported()
    assert (set(AVX512) <= flags) == torch.cpu._is_avx512_supported()
    assert ("amx_tile" in flags) == torch.cpu._is_amx_tile_supported()
