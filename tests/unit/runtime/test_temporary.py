"""The temporary directory of a command: used by libraries and children, removed at the end or by the next command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from oblr_megatron.runtime import temporary
from oblr_megatron.runtime.temporary import PREFIX, own_tmpdir

USE = "import tempfile\nfrom oblr_megatron.runtime.temporary import own_tmpdir\nwith own_tmpdir() as own:\n"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(temporary.SOCKETS, str(tmp_path))  # so that nothing is made in /tmp
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_nothing_stays_and_the_environment_is_restored(base: Path) -> None:
    before = dict(os.environ)
    with own_tmpdir() as own:
        inside = Path(tempfile.mkdtemp())
        assert inside.parent == own and own.parent == base
        child = [sys.executable, "-c", USE + "    print(tempfile.mkdtemp())\n"]
        printed = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(printed).parent == own, "a child uses the directory of its parent"
        assert Path(printed).exists(), "and leaves it to its parent"
    assert dict(os.environ) == before and tempfile.gettempdir() == str(base) and not list(base.iterdir())


def test_the_next_command_removes_what_a_killed_one_left(base: Path) -> None:
    program = USE + "    tempfile.mkdtemp()\n    print('there', flush=True)\n    input()\n"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        (left,) = base.glob(f"{PREFIX}*")
        with own_tmpdir():
            assert left.exists(), "its process runs"
        child.kill()
    with own_tmpdir():
        assert not left.exists()
    assert not list(base.iterdir())


def test_a_directory_of_another_machine_stays(base: Path) -> None:
    """TMPDIR may be shared, and a process of elsewhere is not in this /proc."""
    elsewhere = "from oblr_megatron.runtime import processes\nprocesses.boot_id = lambda: 'another'\n"
    program = elsewhere + USE + "    import os; os._exit(0)\n"
    subprocess.run([sys.executable, "-c", program], check=True)
    (left,) = base.glob(f"{PREFIX}*")
    with own_tmpdir():
        assert left.exists()
    assert list(base.iterdir()) == [left]


def test_multiprocessing_removes_its_own_directory_first(base: Path) -> None:
    program = USE + "    from multiprocessing.util import get_temp_dir\n    print(get_temp_dir())\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent.name.startswith(PREFIX), "the case that is meant"
    assert not done.stderr and not list(base.iterdir())


def test_exec_keeps_the_directory(base: Path) -> None:
    again = USE + "    print(own)\n"
    program = (
        USE + f"    print(own, flush=True)\n    import os, sys; os.execv(sys.executable, ['python', '-c', {again!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second and not list(base.iterdir())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_cache_of_compiled_kernels_is_kept(base: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.delenv(temporary.INDUCTOR_CACHE, raising=False)
    monkeypatch.setattr(temporary, "GPU", base if on_gpu else base / "absent")
    with own_tmpdir():
        assert (Path(os.environ.get(temporary.INDUCTOR_CACHE, "/nowhere/x")).parent == base) == on_gpu
    assert temporary.INDUCTOR_CACHE not in os.environ


@pytest.mark.parametrize("writable", [False, True])
def test_kernels_are_cached_beside_it_if_the_home_directory_is_read_only(
    base: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    monkeypatch.setattr(temporary, "GPU", base)
    monkeypatch.setenv("HOME", str(base) if writable else "/proc/nobody")
    for name in temporary.HOME_CACHES:
        monkeypatch.delenv(name, raising=False)
    with own_tmpdir():
        places = [os.environ.get(name) for name in temporary.HOME_CACHES]
        assert places == [None] * 3 if writable else all(Path(place or "/").parent == base for place in places)
    assert not temporary.HOME_CACHES.keys() & os.environ.keys()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory that stands for /tmp; pytest's own is too long for sockets."""
    monkeypatch.delenv(temporary.SOCKETS, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(temporary, "SHORT", Path(name))
        yield Path(name)


@pytest.mark.parametrize("over", [-1, 0, 1, 60])
def test_vllm_can_bind_its_sockets_below_a_long_tmpdir(short: Path, monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    """vLLM's path is its directory, a slash and a UUID."""
    with own_tmpdir() as own:
        added = len(str(own.name)) + 1
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        base = Path(name) / ("x" * (temporary.LONGEST - added - len(name) - 1 + over))
        base.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        with own_tmpdir() as own:
            assert own.parent == base and len(str(own)) == temporary.LONGEST + over
            moved = os.environ.get(temporary.SOCKETS)
            assert (moved is not None) == (over > 0)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(f"{moved or own}/{uuid.uuid4()}")
        assert temporary.SOCKETS not in os.environ and not list(base.iterdir()) and not list(short.iterdir())


def test_a_killed_commands_directory_of_sockets_is_removed_and_exec_keeps_it(short: Path, base: Path) -> None:
    long = base / ("x" * 60)
    long.mkdir()
    set_up = f"from oblr_megatron.runtime import temporary\ntemporary.SHORT = temporary.Path({str(short)!r})\n" + USE
    killed, whole = f"{set_up}    import os; os._exit(0)\n", f"{set_up}    pass\n"
    replaced = f"{set_up}    import os, sys; os.execv(sys.executable, ['python', '-c', {whole!r}])\n"
    for program, left in ((killed, 1), (whole, 0), (replaced, 0)):
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(long)}, check=True)
        assert len(list(short.iterdir())) == len(list(long.iterdir())) == left


def test_a_users_directory_of_sockets_is_kept(short: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(temporary.SOCKETS, "/run/mine")
    (base / ("x" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base / ("x" * 60)))
    with own_tmpdir():
        assert os.environ[temporary.SOCKETS] == "/run/mine" and not list(short.iterdir())


NAMELESS = "import pwd\ndef unknown(uid): raise KeyError(f'getpwuid(): uid not found: {uid}')\npwd.getpwuid = unknown\n"
GUARDED = """
import getpass, os, tempfile
from oblr_megatron.runtime.command_line import guarded
raise SystemExit(guarded(lambda: print(getpass.getuser(), os.path.dirname(tempfile.gettempdir())) or 0))
"""


@pytest.mark.parametrize(
    ("source", "before", "tmpdir", "status", "said"),
    [
        ("pytorch/pytorch#140765, vllm-project/vllm#46734", NAMELESS, "", 0, "{uid} {base}"),
        (
            "capreolus-ir/capreolus#154",
            "import tempfile\ntempfile._candidate_tempdir_list = list\n",
            "",
            2,
            "set TMPDIR",
        ),
        ("a job's TMPDIR that is not on this node", "", "/nowhere/job-17", 0, "/tmp"),
    ],
)
def test_forms(source: str, before: str, tmpdir: str, status: int, said: str, base: Path) -> None:
    """Containers without a name for the user, full disks, and variables of another node."""
    given = {name: value for name, value in os.environ.items() if name not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    done = subprocess.run(
        [sys.executable, "-c", before + GUARDED],
        check=False,
        env=given | {"TMPDIR": tmpdir or str(base)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, (source, done.stderr)
    assert said.format(uid=os.getuid(), base=base) in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not list(base.iterdir())
