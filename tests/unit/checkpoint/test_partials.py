"""Partial directories of killed writers are removed, those of living ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oblr_megatron.checkpoint import partials, store


def partial_of(directory: Path, host: str, pid: int, target: str = "step_00000010") -> Path:
    partial = directory / f".{target}.{host}-{pid}-0.partial"
    (partial / "hf").mkdir(parents=True)
    (partial / "hf" / "config.json").touch()
    return partial


def test_sweeping_keeps_partials_of_living_processes(tmp_path: Path) -> None:
    here = partials._place()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        living = partial_of(tmp_path, here, child.pid)
        ours = store.begin(tmp_path / store.step_name(10))
        other = partial_of(tmp_path, "other-node.cluster", 1)
        unrelated = tmp_path / ".mine.partial"
        unrelated.mkdir()
        partials.sweep(tmp_path)
        assert living.exists() and not ours.exists() and other.exists() and unrelated.exists()
        child.communicate(b"\n")
    past = time.time() - partials.FOREIGN_PARTIAL_S - 1
    for path in (other, other / "hf"):
        os.utime(path, (past, past))
    partials.sweep(tmp_path)
    assert not living.exists() and other.exists(), "a file in the other host's partial is younger"
    os.utime(other / "hf" / "config.json", (past, past))
    partials.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [unrelated]


@pytest.mark.parametrize("name", ["step_00000010", "qwen3_0.6b"])
def test_a_replaced_directory_gets_its_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where names cannot be exchanged, a kill between two renames leaves the old and the new one under other names."""
    monkeypatch.setattr(partials.socket, "gethostname", lambda: "node7.cluster.org")
    target = tmp_path / name
    for clear in (partials.sweep, partials.remove_all):
        replaced = next(partials.partial_names(target, partials.REPLACED))
        replaced.mkdir()
        (replaced / "old").write_bytes(os.urandom(2**20))
        new = store.begin(target)
        assert partials.disk_bytes(tmp_path) < 2**20, "it is not removed"
        clear(tmp_path)
        assert list(tmp_path.iterdir()) == [target] and (target / "old").exists() and new.parent == tmp_path
        new.mkdir()
        target.rename(replaced)
        new.rename(target)
        assert partials.disk_bytes(tmp_path) >= 2**20
        clear(tmp_path)
        assert list(tmp_path.iterdir()) == [target] and not any(target.iterdir()), "the new one has the name"
        target.rmdir()


def test_of_a_link_only_the_link_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Earlier versions left such links; one names nothing."""
    elsewhere, directory = partial_of(tmp_path / "elsewhere", "n", 1), tmp_path / "checkpoints"
    directory.mkdir()
    for clear in (partials.sweep, partials.remove_all):
        names = partials.partial_names(directory / store.step_name(10))
        for name, target in zip(names, (elsewhere, tmp_path / "absent"), strict=False):
            name.symlink_to(target)
        assert partials.disk_bytes(directory) == 0
        clear(directory)
        assert not list(directory.iterdir()) and (elsewhere / "hf" / "config.json").exists()
    assert str(elsewhere) in caplog.text


def test_process_ids_of_another_container_have_no_meaning_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share the host's name; a process with this id does not run here, or is another one."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(partials, "short_pid_scope", lambda: "0123abcd")
        other = store.begin(tmp_path / store.step_name(10))
    partials.sweep(tmp_path)
    assert other.exists()
    past = time.time() - partials.FOREIGN_PARTIAL_S - 1
    os.utime(other, (past, past))
    partials.sweep(tmp_path)
    assert not other.exists()


def test_another_host_keeps_a_partial_whose_writer_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer changes nothing for long, for example while vLLM answers."""
    monkeypatch.setattr(store, "TOUCH_S", 0.01)
    with store.partial_directory(tmp_path / "fp8") as partial:
        past = time.time() - partials.FOREIGN_PARTIAL_S - 1
        os.utime(partial, (past, past))
        while partial.stat().st_mtime == past:
            time.sleep(0.01)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(partials, "short_pid_scope", lambda: "0123abcd")
            partials.sweep(tmp_path)
        assert partial.exists()
        partial.rename(tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


def test_the_owner_of_a_directory_removes_every_partial_in_it(tmp_path: Path) -> None:
    """Also those of other hosts, of which `sweep` cannot know whether they live."""
    assert partials.disk_bytes(tmp_path / "absent") == 0
    other = partial_of(tmp_path, "other-node.cluster", 1)
    (other / "__0_0.distcp").write_bytes(os.urandom(2**20))
    (tmp_path / "step_00000010").mkdir()
    (tmp_path / "step_00000010" / "__0_0.distcp").write_bytes(os.urandom(2**20))
    assert 2**20 <= partials.disk_bytes(tmp_path) < 2**20 + 2**16
    partials.remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_partials_of_one_target_can_be_removed_alone(tmp_path: Path) -> None:
    """A link's directory may hold exports of other runs."""
    own, other = (partial_of(tmp_path, "other-node", 1, target) for target in ("hf", "hf_best"))
    partials.remove_all(tmp_path, only="hf")
    assert not own.exists() and other.exists()
