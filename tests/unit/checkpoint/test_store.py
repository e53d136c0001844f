"""Checkpoint directories: they are created atomically, and any damage is found and its file named.

Not covered: a power loss between a write and its fsync.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oblr_megatron.checkpoint import partials, store
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.store import CheckpointError, Manifest, NoSpaceError
from oblr_megatron.checks.run_dir import CHECKPOINTS
from oblr_megatron.config import parse_config
from oblr_megatron.errors import RunError, UserError
from tests.tiny import make_hf_dir
from tests.unit.checkpoint.small import FILES, STATE, save


def whole(directory: Path) -> Manifest:
    """Read and check a checkpoint completely."""
    manifest = store.read_manifest(directory)
    store.check_contents(directory, manifest, manifest.files)
    return manifest


def test_a_saved_checkpoint_is_read_back(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    manifest = whole(target)
    assert target.name == "step_00000010" and manifest.step == 10
    assert set(manifest.files) == set(FILES)
    assert [entry.num_bytes for entry in manifest.files.values()] == [len(FILES[name]) for name in manifest.files]
    assert repr(manifest.state["nan"]) == "nan"
    assert {**manifest.state, "nan": 0} == {**STATE, "nan": 0}
    assert [path.name for path in target.parent.iterdir()] == [target.name], "no partial directory is left"


def test_the_checksum_is_xxh3_128_of_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_bytes(bytes(2**20) + b"rest")
    entries = store.measure(tmp_path, ["empty", "large"])
    assert entries["empty"] == store.FileEntry(0, "99aa06d3014798d86001c324468d497f")  # the reference's empty digest
    assert entries["large"].num_bytes == 2**20 + 4
    with (tmp_path / "large").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"T")
    assert store.measure(tmp_path, ["large"])["large"] != entries["large"]


@pytest.mark.parametrize("name", [*FILES, store.MANIFEST])
def test_every_bit_flip_and_every_truncation_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    """Exhaustive, for each file, the manifest included. A truncation is found without the file's content."""
    target = save(tmp_path, 3)
    file = target / name
    good = file.read_bytes()
    flips = [
        (good[:at] + bytes([byte ^ 1 << bit]) + good[at + 1 :]) for at, byte in enumerate(good) for bit in range(8)
    ]
    cuts = [good[:size] for size in range(len(good))]
    for read, damaged in [*((whole, one) for one in flips), *((store.read_manifest, one) for one in cuts)]:
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError) as found:
            read(target)
        assert str(file) in str(found.value), damaged
    file.write_bytes(good)
    whole(target)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    state=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=5,
    )
)
def test_any_plain_state_comes_back(tmp_path: Path, state: dict) -> None:
    assert json.dumps(whole(save(tmp_path, 1, state)).state, sort_keys=True) == json.dumps(state, sort_keys=True)


def test_keys_that_are_numbers_are_strings_when_read(tmp_path: Path) -> None:
    """JSON keys are strings; numbers and strings sort differently."""
    assert whole(save(tmp_path, 1, {2: "a", 10: "b"})).state == {"2": "a", "10": "b"}


def newer(target: Path) -> None:
    content = json.loads((target / store.MANIFEST).read_text())
    del content["xxh3"]
    (target / store.MANIFEST).write_bytes(store._seal({**content, "version": store.VERSION + 1}))


@pytest.mark.parametrize(
    ("harm", "file", "said"),
    [
        (lambda target: (target / "common.pt").unlink(), "common.pt", "missing"),
        (
            lambda target: (target / "common.pt").write_bytes(b"eleven byte"),
            "common.pt",
            "11 bytes, checkpoint.json has 7",
        ),
        (lambda target: (target / store.MANIFEST).unlink(), "", "no checkpoint.json"),
        (lambda target: (target / store.MANIFEST).rename(target / ".metadata"), "", "another program"),
        (lambda target: (target / store.MANIFEST).rename(target / "model-1-of-2.safetensors"), "", "model.path"),
        (lambda target: (target / store.MANIFEST).write_text('{"epoch": 3}'), store.MANIFEST, "oblr_megatron"),
        (newer, store.MANIFEST, "version 3, this program reads 2"),
    ],
)
def test_an_unusable_checkpoint_is_named_in_one_line(tmp_path: Path, harm, file: str, said: str) -> None:
    target = save(tmp_path, 3)
    harm(target)
    with pytest.raises(CheckpointError, match=said) as found:
        store.read_manifest(target)
    assert found.value.where == str(target / file) and found.value.fix
    assert "\n" not in str(found.value)


def test_there_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("step_00000001", "file"):
        with pytest.raises(CheckpointError) as found:
            store.read_manifest(tmp_path / name)
        assert found.value.where == str(tmp_path / name)


def test_an_unlisted_file_is_harmless_but_cannot_be_checked(tmp_path: Path) -> None:
    target = save(tmp_path, 3)
    (target / "note.txt").touch()
    manifest = whole(target)
    with pytest.raises(CheckpointError) as found:
        store.check_contents(target, manifest, ["note.txt"])
    assert found.value.where == str(target / "note.txt")


@pytest.mark.parametrize("flag", [store._RENAME_EXCHANGE, 1 << 30])  # the second is one that the kernel does not know
def test_a_checkpoint_is_replaced(tmp_path: Path, monkeypatch, flag: int) -> None:
    """A run resumed from an earlier step saves the same step again, also where names cannot be exchanged."""
    monkeypatch.setattr(store, "_RENAME_EXCHANGE", flag)
    save(tmp_path, 3, {"turn": 1})
    target = save(tmp_path, 3, {"turn": 2})
    assert whole(target).state == {"turn": 2}
    assert list(target.parent.iterdir()) == [target]


def test_a_conversion_replaces_nothing_that_came_meanwhile(tmp_path: Path) -> None:
    target = save(tmp_path, 3, {"turn": 1})
    partial = store.begin(target)
    (partial / "note.txt").write_text("mine")
    with pytest.raises(RunError, match="cannot write"):
        store.commit(partial, target, store.Manifest(3, store.measure(partial, ["note.txt"]), {}), replaces=False)
    assert whole(target).state == {"turn": 1}


def test_a_target_needs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current directory passes all other checks, and the work would be lost at its end."""
    monkeypatch.chdir(tmp_path)
    for target in (Path(), Path("..")):
        with pytest.raises(UserError, match="current directory"):
            store.check_absent(target)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing handles it, unlike an OSError."""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kill_between_renames_leaves_an_intact_checkpoint(tmp_path: Path, monkeypatch, number: int) -> None:
    """Where names cannot be exchanged; the checkpoint is the only one. `number` renames are done before the kill."""
    target = save(tmp_path, 3, {"turn": 1})
    renamed, rename = [], Path.rename

    def killed(path: Path, to: Path) -> Path:
        renamed.append(rename(path, to))
        if len(renamed) == number:
            raise Killed
        return to

    with monkeypatch.context() as until_killed, pytest.raises(Killed):
        until_killed.setattr(store, "_RENAME_EXCHANGE", 1 << 30)  # a flag that the kernel does not know
        until_killed.setattr(Path, "rename", killed)
        save(tmp_path, 3, {"turn": 2})
    partials.remove_all(target.parent)
    assert list(target.parent.iterdir()) == [target]
    assert whole(target).state == {"turn": 1 if number == 1 else 2}


def test_a_rename_that_fails_leaves_the_target_unchanged(tmp_path: Path, monkeypatch) -> None:
    target = save(tmp_path, 3, {"turn": 1})
    renamed, rename = [], Path.rename

    def stale(path: Path, to: Path) -> Path:
        renamed.append(path)
        if len(renamed) == 2:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return rename(path, to)

    with monkeypatch.context() as while_stale, pytest.raises(RunError, match="Stale file handle"):
        while_stale.setattr(store, "_RENAME_EXCHANGE", 1 << 30)
        while_stale.setattr(Path, "rename", stale)
        save(tmp_path, 3, {"turn": 2})
    assert len(renamed) == 3 and whole(target).state == {"turn": 1}


def test_a_checkpoint_that_is_a_link_is_left_where_it_lies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user moved 1 and 2 to an archive. 1 is pruned and 2 is saved again: each link goes, its target stays."""
    first, second = (save(tmp_path, step) for step in (1, 2))
    for path in (first, second):
        path.symlink_to(path.rename(tmp_path / path.name))
    save(tmp_path, 2)
    store.prune(second, 1, [])
    assert list(second.parent.iterdir()) == [second] and not second.is_symlink()
    for path in (first, second):
        whole(tmp_path / path.name)
        assert f"stays: {tmp_path / path.name}" in caplog.text
    third = second.with_name(store.step_name(3))
    third.symlink_to(tmp_path / "nowhere")
    whole(save(tmp_path, 3))


def test_newest_first_and_only_what_was_committed(tmp_path: Path) -> None:
    assert store.checkpoints_of(tmp_path) == []
    saved = [save(tmp_path, step) for step in (9, 10, 123456789, 2)]
    store.begin(saved[0].with_name(store.step_name(11)))
    (saved[0].parent / "step_7").mkdir()
    (saved[0].parent / "step_00000077").touch()
    names = [path.name for path in store.checkpoints_of(tmp_path)]
    assert names == ["step_123456789", "step_00000010", "step_00000009", "step_00000002"]


def test_pruning_keeps_the_newest_and_the_named_ones(tmp_path: Path) -> None:
    saved = [save(tmp_path, step) for step in range(1, 7)]
    store.prune(saved[-1], 2, [saved[1]])
    assert sorted(os.listdir(saved[0].parent)) == ["step_00000002", "step_00000005", "step_00000006"]
    for path in (saved[1], saved[4], saved[5]):
        whole(path)


def test_a_save_removes_neither_itself_nor_later_steps(tmp_path: Path) -> None:
    """A run that resumed at 20, because 40 is damaged, saves 25: 40 does not count as the newest."""
    best, older, committed, _ = (save(tmp_path, step) for step in (10, 20, 25, 40))
    store.prune(committed, 1, [best])
    assert sorted(os.listdir(committed.parent)) == ["step_00000010", "step_00000025", "step_00000040"]
    assert not older.exists()


def test_what_a_run_resumed_from_stays_until_as_many_newer_ones_are_intact(tmp_path: Path) -> None:
    """30 is cut off; 40 has a flipped bit, which the resumed run knows. 20 is what it resumed from."""
    oldest, used, cut, flipped, newest = (save(tmp_path, step) for step in (10, 20, 30, 40, 60))
    (cut / "__0_0.distcp").write_bytes(b"")
    store.prune(newest, 2, [], damaged={flipped})
    assert store.checkpoints_of(tmp_path) == [newest, flipped, cut, used] and not oldest.exists()
    next_one = save(tmp_path, 80)
    store.prune(next_one, 2, [], damaged={flipped})
    assert store.checkpoints_of(tmp_path) == [next_one, newest]


def test_partials_of_one_process_have_different_names(tmp_path: Path) -> None:
    target = tmp_path / "deep" / store.step_name(1)
    first, second = store.begin(target), store.begin(target)
    assert first != second and first.parent == second.parent == target.parent


def test_free_space_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: status)  # others use the disk as well
    free = status.f_bavail * status.f_frsize
    store.check_space(tmp_path / "not" / "there", free // 2)
    with pytest.raises(NoSpaceError, match=r"[\d.]+ GiB needed, [\d.]+ GiB free"):
        store.check_space(tmp_path, free - store.RESERVE_BYTES // 2)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4 + 8), ("bfloat16", 2 + 4 + 8)])
def test_a_checkpoint_of_adapters_needs_room_for_these_alone(tmp_path: Path, dtype: str, bytes_each: int) -> None:
    model = check_hf_dir(make_hf_dir(tmp_path / "model"))
    table = {"run_dir": "r", "data": {"train": "t.jsonl"}, "model": {"path": str(tmp_path / "model"), "dtype": dtype}}
    needed = store.checkpoint_bytes(model, parse_config(table)) - store.FIXED_BYTES
    assert needed == bytes_each * sum(prod(shape) for shape in model.shapes.values())
    width, layers, heads = (model.config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    adapted = parse_config(table, "here", ["model.lora.rank=3", "model.lora.targets=['o_proj']"])
    of_adapters = 3 * layers * (width + heads * model.config["head_dim"])
    assert store.checkpoint_bytes(model, adapted) - store.FIXED_BYTES == bytes_each * of_adapters


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    """The manifest is a link to /dev/full."""
    target = save(tmp_path, 3, {"turn": 1})
    partial = store.begin(target)
    (partial / store.MANIFEST).symlink_to("/dev/full")
    with pytest.raises(NoSpaceError, match=rf"cannot write {partial}.*No space left on device"):
        store.commit(partial, target, Manifest(3, {}, {"turn": 2}))
    assert whole(target).state == {"turn": 1}


@pytest.mark.parametrize(("code", "kind"), [(errno.EDQUOT, NoSpaceError), (errno.EIO, RunError)])
def test_an_os_error_becomes_one_line(tmp_path: Path, code: int, kind: type) -> None:
    with pytest.raises(RunError, match="cannot write") as found, store.writing(tmp_path):
        raise OSError(code, os.strerror(code))
    assert type(found.value) is kind and "\n" not in str(found.value)


def test_a_kill_at_any_time_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    """A process saves, replaces and prunes in a loop; every named checkpoint is intact after the kill."""
    program = (
        "import itertools, sys\nfrom pathlib import Path\n"
        "from oblr_megatron.checkpoint import store\nfrom tests.unit.checkpoint.small import save\n"
        "run = Path(sys.argv[1])\nprint('go', flush=True)\n"
        "for n in itertools.count():\n"
        "    store.prune(save(run, n // 2 + 1), 1, [])\n"
    )
    save(tmp_path, 0)
    for attempt in range(4):
        command = [sys.executable, "-c", program, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"go\n"
            time.sleep(0.05 + 0.0137 * attempt)
            child.send_signal(signal.SIGKILL)
        found = store.checkpoints_of(tmp_path)
        assert found
        for path in found:
            whole(path)
        partials.sweep(tmp_path / CHECKPOINTS)
        assert not list((tmp_path / CHECKPOINTS).glob(".*"))
