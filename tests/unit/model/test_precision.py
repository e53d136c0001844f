"""Precision: megatron-core's configuration of each FP8 recipe, and refusals by fields, sizes and machine.

Not covered: the kernels (tests/gpu).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from oblr_megatron.checks.layout import check_layout
from oblr_megatron.checks.machine import RECIPES, Machine, check_machine, transformer_engine_chosen
from oblr_megatron.config import Config, ModelConfig, parse_config
from oblr_megatron.config.norm_modes import mode_problem
from oblr_megatron.errors import UserError
from oblr_megatron.memory.select_mode import resolve
from oblr_megatron.model import precision
from oblr_megatron.model.precision import precision_fields, slow_bfloat16, this_machine
from oblr_megatron.model.published import published

CPU, HOPPER = Machine(), Machine((9, 0), "13.0", "2.11.0")
WITHOUT_ENGINE = Machine((9, 0), "13.0", None)
FP8 = ["model.dtype=bfloat16", "model.fp8=hybrid"]
QUANTIZED = ["model.dtype=bfloat16", "rollout.quantization=fp8"]


FP32_ENGINE = ("model.transformer_impl=transformer_engine", "model.dtype=float32")


def config_of(*overrides: str) -> Config:
    return parse_config({"run_dir": "r", "model": {"path": "q"}, "data": {"train": "d"}}, overrides=overrides)


def model_of(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"path": "q", "dtype": "bfloat16"} | fields)


def test_every_recipe_is_known_to_megatron_and_has_its_requirements() -> None:
    recipes = get_args(ModelConfig.model_fields["fp8_recipe"].annotation)
    assert set(recipes) == set(RECIPES)
    for recipe in recipes:
        fields = precision_fields(model_of(fp8="hybrid", fp8_recipe=recipe), transformer_engine=True)
        made = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fields)
        assert (made.fp8, made.fp8_recipe) == ("hybrid", recipe)
        assert not made.first_last_layers_bf16


def test_fp8_fields_arrive() -> None:
    ends = model_of(fp8="hybrid", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=3)
    fields = precision_fields(ends, transformer_engine=True)
    made = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fields)
    assert made.first_last_layers_bf16
    assert (made.num_layers_at_start_in_bf16, made.num_layers_at_end_in_bf16) == (2, 3)


def test_only_transformer_engine_gets_fp8_fields() -> None:
    model = model_of(fp8="hybrid")
    assert "fp8" not in precision_fields(model, transformer_engine=False)
    assert precision_fields(model, transformer_engine=True)["fp8"] == "hybrid"
    assert precision_fields(model, transformer_engine=False)["params_dtype"] == torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.fp8=hybrid"], 'fp8 "hybrid" with dtype "float32"'),
        ([*FP8, "model.transformer_impl=local"], 'transformer_impl "local"'),
        (["model.transformer_impl=transformer_engine", "model.dtype=float64"], 'dtype "float64"'),
        (["rollout.quantization=fp8"], "weights pushed in float32"),
        ([*QUANTIZED, "rollout.importance_sampling=none"], 'importance_sampling "none"'),
        ([*QUANTIZED, "weights.verify=true"], "weights.verify with"),
    ],
)
def test_incompatible_fields_are_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(*overrides)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        FP8,
        [*FP8, "model.num_layers_at_start_in_bf16=1"],
        [*FP8, "gradnorm.mode=stash"],
        [*FP8, "parallel.recompute_granularity=selective", 'parallel.recompute_modules=["layernorm"]'],
        QUANTIZED,
        [*QUANTIZED, "rollout.importance_sampling=sequence"],
        ["rollout.quantization=fp8", "rollout.dtype=bfloat16"],
        [*QUANTIZED, "rollout.importance_sampling=none", "rollout.only=true"],
    ],
)
def test_compatible_fields_are_accepted(overrides: list[str]) -> None:
    config_of(*overrides)


@pytest.mark.parametrize(("overrides", "refused"), [([], {}), (FP8, {"bookkeep": "expose no factors"})])
def test_modes_that_measure_norms(overrides: list[str], refused: dict[str, str]) -> None:
    config = config_of(*overrides, "gradnorm.always=true")
    for mode in ("two_pass", "stash", "bookkeep"):
        problem = mode_problem(config, mode)
        assert (problem is not None) == (mode in refused), (mode, problem)
        assert problem is None or refused[mode] in problem[0]


def test_mode_auto_avoids_what_fp8_forbids() -> None:
    dense, world = published("0.6B"), {"on_gpu": True, "transformer_engine": True}
    assert resolve(dense, config_of(*FP8, "rollout.max_response_tokens=64"), 1, **world).mode != "bookkeep"
    unused = resolve(dense, config_of(*FP8, "gradnorm.mode=bookkeep", "algo.baseline=rloo"), 1, **world)
    assert unused.mode == "bookkeep", "allowed, because rloo measures no norms"
    with pytest.raises(UserError, match="2 replicas share experts"):
        resolve(published("30B-A3B"), config_of(*FP8, "parallel.expert_model_parallel_size=2"), 2, **world)


TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")


@pytest.mark.parametrize(
    ("size", "world", "overrides", "named"),
    [
        (
            "0.6B",
            7,
            [*FP8, "parallel.pipeline_model_parallel_size=7", "model.num_layers_at_end_in_bf16=5"],
            "num_layers_at_end_in_bf16 5 is more than the 4 layers",
        ),
        ("8B", 8, [*FP8, "parallel.tensor_model_parallel_size=8"], None),
        ("30B-A3B", 4, [*FP8, "model.fp8_recipe=mxfp8", "parallel.expert_model_parallel_size=4"], None),
        ("30B-A3B", 2, ["model.lora.rank=8", *TP2], "adapters of experts that 2 tensor-parallel ranks share"),
        ("30B-A3B", 2, ["model.lora.rank=8", *TP2, "parallel.expert_tensor_parallel_size=1"], None),
        ("30B-A3B", 2, ["model.lora.rank=8", *TP2, "model.lora.targets=q_proj"], None),
        (
            "8B",
            16,
            ["model.lora.rank=8", "parallel.tensor_model_parallel_size=16"],
            "8 groups of heads cannot be shared whole by 16 ranks",
        ),
    ],
)
def test_sizes(size: str, world: int, overrides: list[str], named: str | None) -> None:
    if named is None:
        check_layout(published(size), config_of(*overrides), world)
        return
    with pytest.raises(UserError) as caught:
        check_layout(published(size), config_of(*overrides), world)
    assert named in str(caught.value)


def test_shards_of_a_size_without_fp8_products_are_refused() -> None:
    narrow = published("0.6B") | {"intermediate_size": 3000}
    check_layout(narrow, config_of("model.dtype=bfloat16"), 1)
    with pytest.raises(UserError, match="intermediate_size 3000 on each rank is not a multiple of 16"):
        check_layout(narrow, config_of(*FP8), 1)


@pytest.mark.parametrize(
    ("machine", "recipe", "missing"),
    [
        (CPU, "tensorwise", "a GPU"),
        (WITHOUT_ENGINE, "tensorwise", "Transformer Engine"),
        (HOPPER, "tensorwise", None),
        (HOPPER, "blockwise", None),
        (HOPPER, "mxfp8", "compute capability 10.0 (this GPU has 9.0)"),
        (Machine((10, 0), "13.0", "2.11.0"), "mxfp8", None),
        (Machine((12, 0), "13.0", "2.11.0"), "mxfp8", "compute capability below 12.0 (this GPU has 12.0)"),
        (Machine((8, 9), "13.0", "2.11.0"), "tensorwise", None),
        (Machine((8, 9), "13.0", "2.11.0"), "blockwise", "compute capability 9.0 (this GPU has 8.9)"),
        (Machine((8, 0), "13.0", "2.11.0"), "tensorwise", "compute capability 8.9 (this GPU has 8.0)"),
        (Machine((9, 0), "12.8", "2.11.0"), "blockwise", "CUDA 12.9 (torch was built with 12.8)"),
        (Machine((9, 0), "13.0", "2.1.0"), "tensorwise", "Transformer Engine 2.2 (here is 2.1.0)"),
        (Machine((9, 0), "13.0", "2.11.0+c9e3b1a"), "blockwise", None),
    ],
)
def test_requirements_of_recipes(machine: Machine, recipe: str, missing: str | None) -> None:
    assert RECIPES[recipe].missing(machine) == missing
    config = config_of(*FP8, f"model.fp8_recipe={recipe}")
    if missing is None:
        check_machine(config, published("0.6B"), machine)
        return
    with pytest.raises(UserError) as caught:
        check_machine(config, published("0.6B"), machine)
    assert f'fp8_recipe "{recipe}" needs {missing}' in str(caught.value)


def test_the_fix_names_the_possible_recipes() -> None:
    with pytest.raises(UserError, match="tensorwise, blockwise"):
        check_machine(config_of(*FP8, "model.fp8_recipe=mxfp8"), published("0.6B"), HOPPER)


@pytest.mark.parametrize(
    ("overrides", "size", "machine", "named"),
    [
        (["model.transformer_impl=transformer_engine"], "0.6B", CPU, "there is no GPU"),
        (["model.transformer_impl=transformer_engine"], "0.6B", WITHOUT_ENGINE, "it is not installed"),
        (["model.transformer_impl=local"], "30B-A3B", HOPPER, "a mixture of experts on a GPU"),
        ([], "30B-A3B", WITHOUT_ENGINE, "a mixture of experts on a GPU"),
        ([], "30B-A3B", HOPPER, 'model.dtype to "bfloat16"'),
        ([*FP32_ENGINE, "parallel.context_parallel_size=2"], "0.6B", HOPPER, "no attention in fp32 for context"),
        ([*FP32_ENGINE, "parallel.packing=packed"], "0.6B", HOPPER, "or packed rows"),
        (QUANTIZED, "0.6B", CPU, "a push into a CPU engine writes plain weights"),
    ],
)
def test_requirements_that_a_machine_lacks(overrides: list[str], size: str, machine: Machine, named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_machine(config_of(*overrides), published(size), machine)
    assert named in str(caught.value)


def test_sufficient_machines_are_accepted() -> None:
    check_machine(config_of(), published("30B-A3B"), CPU)
    check_machine(config_of("model.transformer_impl=transformer_engine"), published("30B-A3B"), HOPPER)
    check_machine(config_of(*QUANTIZED), published("0.6B"), WITHOUT_ENGINE)
    check_machine(config_of(*FP8, "rollout.only=true"), published("0.6B"), CPU)


@pytest.mark.parametrize(
    ("fields", "machine", "chosen"),
    [
        ({"dtype": "bfloat16"}, HOPPER, True),
        ({"dtype": "bfloat16"}, WITHOUT_ENGINE, False),
        ({"dtype": "bfloat16"}, Machine(transformer_engine="2.11.0"), False),
        ({"dtype": "bfloat16", "transformer_impl": "local"}, HOPPER, False),
        ({"dtype": "float32"}, HOPPER, False),
        ({"dtype": "float64"}, HOPPER, False),
        ({"transformer_impl": "transformer_engine"}, HOPPER, True),
    ],
)
def test_selection_of_transformer_engine(fields: dict[str, Any], machine: Machine, chosen: bool) -> None:
    assert transformer_engine_chosen(model_of(**fields), machine) is chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("dtype", "fast", "warned"), [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)]
)
def test_a_processor_without_products_of_bfloat16_is_warned_of(
    dtype: str, fast: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    assert bool(slow_bfloat16(model_of(dtype=dtype))) is warned


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_this_machine() -> None:
    assert this_machine().capability is None and not this_machine().has_layers


@pytest.mark.parametrize(
    ("package", "torch_part", "reason"),
    [
        ("", "raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
        ("raise RuntimeError('found empty transformer-engine')", "", "RuntimeError: found empty transformer-engine"),
        ("", None, "ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
        ("", "", ""),
    ],
)
def test_a_transformer_engine_that_cannot_be_imported_is_not_used(
    package: str, torch_part: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, facts = tmp_path / "transformer_engine", tmp_path / "transformer_engine-2.11.0.dist-info"
    folder.mkdir()
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.11.0\n")
    (folder / "__init__.py").write_text(package)
    if torch_part is not None:
        (folder / "pytorch.py").write_text(torch_part)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    precision._transformer_engine.cache_clear()
    try:
        machine = replace(this_machine(), capability=(9, 0))
    finally:
        precision._transformer_engine.cache_clear()
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            sys.modules.pop(name, None)
    assert machine.transformer_engine == (None if reason else "2.11.0")
    assert machine.engine_fault == (reason and f"transformer-engine 2.11.0: {reason}")
    breaks = reason.startswith("RuntimeError")  # megatron-core's import, too
    for options, refused in (
        (["model.dtype=bfloat16"], bool(reason)),
        (["model.dtype=float32"], breaks),  # which takes megatron-core's own layers
        (["model.dtype=bfloat16", "model.transformer_impl=local"], breaks),
    ):
        config = config_of(*options)
        with pytest.raises(UserError) if refused else nullcontext() as caught:
            check_machine(config, published("0.6B"), machine)
        if caught is not None:
            assert caught.value.where == "config: model.transformer_impl" and reason in caught.value.what
