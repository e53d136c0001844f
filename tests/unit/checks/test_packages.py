"""What pip installs is what the program accepts: setup.py and the lock against checks/packages.py.

Not covered: whether the accepted versions work. docs/architecture.md says how to try another megatron-core.
"""

from __future__ import annotations

import runpy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from oblr_megatron.checks.lock import pins
from oblr_megatron.checks.packages import PACKAGES, Package

ROOT = Path(__file__).resolve().parents[3]
BOUNDED = [package for package in PACKAGES if package.accepted and package.name != "transformer-engine"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, SpecifierSet]:
    """The versions that setup.py asks for, in an install and in all its extras."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    texts = chain(arguments["install_requires"], *arguments["extras_require"].values())
    return {requirement.name: requirement.specifier for requirement in map(Requirement, texts)}


@pytest.mark.parametrize("package", BOUNDED, ids=lambda package: package.name)
def test_setup_asks_for_what_is_accepted(package: Package, asked: dict[str, SpecifierSet]) -> None:
    assert asked[package.name] == SpecifierSet(package.accepted)


def test_the_locks_versions_are_accepted() -> None:
    found = pins(ROOT / "requirements" / "cpu.txt")
    locked = [(package, found[name]) for package in PACKAGES for name in package.distributions if name in found]
    assert {"torch", "megatron-core", "vllm", "transformers"} <= {package.name for package, _ in locked}
    assert [(package.name, version) for package, version in locked if not package.accepts(str(version))] == []


def test_megatron_core_is_accepted_in_the_versions_that_were_run() -> None:
    (megatron,) = (package for package in PACKAGES if package.name == "megatron-core")
    ran = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
    assert [version for version in ("0.16.0", *ran, "0.20.0") if megatron.accepts(version)] == list(ran)
