"""What is installed against a lock. Not covered: an environment that was installed from one (`make gpu-env`)."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path

import pytest

from oblr_megatron.checks.lock import differences, pins
from oblr_megatron.errors import EXIT_OK, EXIT_USER, UserError
from oblr_megatron.preflight import doctor


def lock(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "lock.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_installed_versions_agree(tmp_path: Path) -> None:
    names = ("numpy", "torch", "packaging", "typing_extensions")
    path = lock(tmp_path, "# comment", "", *(f"{name}=={metadata.version(name)}  # why" for name in names))
    assert differences(path) == []
    assert len(pins(path)) == len(names)


def test_each_difference_is_named(tmp_path: Path) -> None:
    here = metadata.version("numpy")
    path = lock(tmp_path, "numpy==0.1", "no-such-package==1.0", f"packaging=={metadata.version('packaging')}")
    assert differences(path) == [f"numpy {here} is installed instead of 0.1", "no-such-package 1.0 is not installed"]


def test_a_local_version_is_the_public_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock(tmp_path, "torch==2.13.0")
    for found, same in {"2.13.0+cpu": True, "2.13.0": True, "2.13.0.post1": False, "2.13.1+cpu": False}.items():
        monkeypatch.setattr("oblr_megatron.checks.lock.installed_version", lambda _, version=found: version)
        assert (differences(path) == []) is same, found


def test_lines_for_another_python_are_left_out(tmp_path: Path) -> None:
    path = lock(tmp_path, 'a==1; python_version < "3"', 'a==2; python_version >= "3"')
    assert str(pins(path)["a"]) == "2"


@pytest.mark.parametrize("line", ["numpy>=2", "numpy", "numpy==1,<2", "numpy==1.*", "-r other.txt", "numpy=2"])
def test_what_is_not_a_pin_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError) as refused:
        pins(lock(tmp_path, "packaging==26.3", line))
    assert refused.value.where == f"{tmp_path / 'lock.txt'}:2" and line in refused.value.what


def test_a_missing_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        pins(tmp_path / "none.txt")
    assert refused.value.where.endswith("none.txt")


def test_doctor_prints_each_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no line is broken
    same = lock(tmp_path, f"numpy=={metadata.version('numpy')}")
    assert doctor.run(argparse.Namespace(json=False, lock=[same])) == EXIT_OK
    assert f"{same}: 1 of 1 packages are installed as locked" in capsys.readouterr().out
    other = lock(tmp_path, "numpy==0.1", "packaging==0.2")
    assert doctor.run(argparse.Namespace(json=True, lock=[other])) == EXIT_USER
    report = json.loads(capsys.readouterr().out)
    assert [line.split()[0] for line in report["problems"]] == ["numpy", "packaging"]
    assert report["locks"] == {str(other): "0 of 2 packages are installed as locked"}
