"""The job scripts as text: equal except for settings, with headers that fit the configs.

tests/e2e/test_slurm.py executes them under a real SLURM.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oblr_megatron.checks.layout import check_world_size
from oblr_megatron.config import Config, load_config

ROOT = Path(__file__).resolve().parents[4]
SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b_a3b", "235b_a22b")
NAMES = (*(f"qwen3_{size}" for size in SIZES), "qwen2.5_7b", "qwen2.5_32b", "llama3.1_8b")
BASH = [*sorted((ROOT / "slurm").glob("*.sh")), *sorted((ROOT / "tests/slurm").glob("*.sh"))]
CALLED = """#!/bin/sh
echo "${0##*/} $*" >>"$0.calls"
printenv >"$0.env"
case "$*" in "$SIGNAL_AT"*) kill -USR1 "$SCRIPT" ;; esac
"""  # a fake command; it may send the script's signal, as SLURM would
SCONTROL = """[ "$2" = hostnames ] && echo node
exit 0
"""
OWN = re.compile(r"#SBATCH --(job-name|nodes|time|signal)=|# (?:Qwen|Llama)|OBLR_CONFIG=")  # lines that differ by size


def script(name: str) -> Path:
    return ROOT / "slurm" / f"oblr_{name}.sh"


def header(name: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script(name).read_text(), re.MULTILINE))


def config(name: str) -> Config:
    return load_config(ROOT / "slurm" / "configs" / f"{name}.toml")


def test_there_is_one_script_per_model() -> None:
    found = {path.stem.removeprefix("oblr_") for path in (ROOT / "slurm").glob("oblr_*.sh")}
    assert found == {*NAMES, "servers", "qwen3_8b_lora"}


def test_scripts_differ_only_in_settings() -> None:
    common = {
        "\n".join(line for line in script(name).read_text().splitlines() if not OWN.match(line)) for name in NAMES
    }
    assert len(common) == 1
    assert all(len(OWN.findall(line)) <= 1 for line in common)
    assert all(re.findall(r"[\w.]+b\w*\.toml", script(name).read_text()) == [f"{name}.toml"] for name in NAMES)
    assert all(header(name)["job-name"] == script(name).stem for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_nodes_asked_for_are_those_of_the_config(name: str) -> None:
    nodes, gpus = int(header(name)["nodes"]), int(header(name)["gpus-per-node"])
    loaded = config(name)
    check_world_size(loaded.parallel, nodes * gpus)
    assert gpus % loaded.rollout.tensor_parallel_size == 0
    first = (ROOT / "slurm" / "configs" / f"{name}.toml").read_text().splitlines()[0]
    assert re.findall(r"on (\d+) nodes? of 8", first) == [str(nodes)]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_gets_a_signal_and_may_be_requeued(name: str) -> None:
    lines = script(name).read_text()
    assert re.fullmatch(r"B:USR1@\d+", header(name)["signal"])
    assert "#SBATCH --requeue\n" in lines and header(name)["open-mode"] == "append" and "%j" in header(name)["output"]
    hours, minutes, seconds = map(int, header(name)["time"].split(":"))
    assert int(header(name)["signal"].partition("@")[2]) < (60 * hours + minutes) * 60 + seconds


@pytest.mark.parametrize("given", [(), ("8b",), ("../configs/no",)])
def test_servers_refuse_what_is_no_preset_and_list_them(given: tuple[str, ...]) -> None:
    environment = {"PATH": os.environ["PATH"], "OBLR_HOME": str(ROOT)}
    found = subprocess.run(
        ["bash", script("servers"), *given], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr.startswith("error: no preset") and all(name in found.stderr for name in NAMES)


def test_scripts_can_be_executed() -> None:
    """`make lint` checks their syntax."""
    assert [path for path in BASH if path.name != "lib.sh" and not os.access(path, os.X_OK)] == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OBLR_HOME": "/nowhere"}, "/nowhere"),
        ({}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "1", "OBLR_CONFIG": "none.toml"}, "none.toml"),
    ],
)
def test_a_wrong_start_is_refused_in_one_line(variables: dict[str, str], message: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OBLR_"))}
    done = subprocess.run(
        ["bash", str(script("qwen3_8b"))], cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def started(
    directory: Path, name: str, *words: str, srun: str = "exit 3", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Start a script by a relative path in a job of two components, where every srun fails unless `srun` says more."""
    for command, text in (("scontrol", SCONTROL), ("srun", srun), ("git", ""), ("cat", 'exec /bin/cat "$@"')):
        (directory / command).write_text(CALLED + text)
        (directory / command).chmod(0o755)
    own = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NODELIST_HET_GROUP_1": "node"}
    own |= {"SLURM_JOB_END_TIME": f"{time.time() + 300:.0f}", "PATH": f"{directory}:{os.environ['PATH']}"}
    own |= {"OBLR_HOME": str(ROOT), "OBLR_LOGS": str(directory), "OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    own |= {"SIGNAL_AT": "never"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "OBLR_"))}
    command = ["bash", "-c", 'export SCRIPT=$$; exec bash "$@"', "job", f"./{script(name).name}", *words]
    return subprocess.run(
        command, cwd=ROOT / "slurm", env=kept | own | settings, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_script_with_a_relative_path_finds_its_own_signal(tmp_path: Path) -> None:
    """As under salloc: oblr_run changes to OBLR_HOME before it reads the script's header."""
    said = started(tmp_path, "qwen3_8b").stdout
    assert "asks for a signal 600 s before the end" in said and "oblr: job 5, attempt 0" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"OBLR_GPUS_PER_NODE": "abc"}, "OBLR_GPUS_PER_NODE is 'abc'. Fix: set it to a whole number from 0 to 64"),
        ({"OBLR_GPUS_PER_NODE": "h100:8"}, "OBLR_GPUS_PER_NODE is 'h100:8'"),
        ({"OBLR_GPUS_PER_NODE": "08"}, "OBLR_GPUS_PER_NODE is '08'"),
        ({"OBLR_GPUS_PER_NODE": "-1"}, "OBLR_GPUS_PER_NODE is '-1'"),
        ({"OBLR_GPUS_PER_NODE": "0", "OBLR_RANKS_PER_NODE": "0"}, "OBLR_RANKS_PER_NODE is '0'"),
        ({"OBLR_SERVER_TP": "0"}, "OBLR_SERVER_TP is '0'. Fix: set it to a whole number from 1 to 8"),
        ({"OBLR_SERVER_TP": "16"}, "OBLR_SERVER_TP is '16'"),
        ({"OBLR_SERVER_TP": "2", "OBLR_GPUS_PER_NODE": "0"}, "OBLR_SERVER_TP is '2'"),
        ({"OBLR_DRY_RUN": "no"}, "OBLR_DRY_RUN is 'no'. Fix: set it to a whole number from 0 to 1"),
        ({"OBLR_PREFLIGHT": "2"}, "OBLR_PREFLIGHT is '2'"),
        ({"OBLR_REQUEUE": "false"}, "OBLR_REQUEUE is 'false'"),
        ({"OBLR_REQUEUE_FAILED": "yes"}, "OBLR_REQUEUE_FAILED is 'yes'"),
    ],
)
def test_numbers_are_checked(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    done = started(tmp_path, "servers", "qwen3_8b", **settings)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("preset", "words", "settings", "servers"),
    [
        ("qwen3_8b", [], {}, 2),
        ("qwen3_0.6b", [], {}, 8),
        ("qwen3_32b", [], {}, 1),
        ("qwen3_32b", ["rollout.tensor_parallel_size=4"], {}, 2),
        ("qwen3_32b", [], {"OBLR_SERVER_TP": "2"}, 4),
        ("qwen3_32b", [], {"OBLR_GPUS_PER_NODE": "0"}, 1),
    ],
)
def test_a_server_has_as_many_gpus_as_an_engine_of_the_preset(
    tmp_path: Path, preset: str, words: list[str], settings: dict[str, str], servers: int
) -> None:
    said = started(tmp_path, "servers", preset, *words, **settings).stdout
    (line,) = (line for line in said.splitlines() if "servers: http" in line)
    assert line.count("http://node:") == servers


def test_tasks_inherit_the_scripts_environment(tmp_path: Path) -> None:
    """sbatch --export=NONE sets SLURM_EXPORT_ENV, which srun reads."""
    started(tmp_path, "servers", "qwen3_8b", SLURM_EXPORT_ENV="NONE", NCCL_DEBUG="INFO")
    found = (tmp_path / "srun.env").read_text().splitlines()
    assert {"SLURM_EXPORT_ENV=ALL", "TORCH_FR_BUFFER_SIZE=2000", "NCCL_DEBUG=INFO"} < set(found)
    assert any(line.startswith("OBLR_API_KEY=") for line in found)


def test_a_config_of_the_users_own_keeps_its_keys(tmp_path: Path) -> None:
    """The job of adapters has keys for the preset alone."""
    own = "slurm/configs/qwen3_0.6b.toml"
    for settings, found in (({}, True), ({"OBLR_CONFIG": own}, False)):
        started(tmp_path, "qwen3_8b_lora", OBLR_GPUS_PER_NODE="1", **settings)
        assert ("model.lora.rank=16" in (tmp_path / "srun.calls").read_text().splitlines()[-1]) is found


def test_a_relative_repository_is_made_absolute(tmp_path: Path) -> None:
    started(tmp_path, "qwen3_8b", OBLR_HOME="..", OBLR_CONTAINER="image")
    assert f" --container-workdir={ROOT} " in (tmp_path / "srun.calls").read_text()


def test_tasks_in_a_container_run_the_repositorys_code(tmp_path: Path) -> None:
    """The image has a copy of its own, which PYTHONPATH precedes, also under -P."""
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("print('of PYTHONPATH')")
    command = [sys.executable, "-P", "-c", "import json"]
    assert subprocess.check_output(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}) == b"of PYTHONPATH\n"
    for settings, expected in (({}, "/own"), ({"OBLR_CONTAINER": "image"}, f"{ROOT}:/own")):
        started(tmp_path, "qwen3_8b", PYTHONPATH="/own", **settings)
        assert f"PYTHONPATH={expected}" in (tmp_path / "srun.env").read_text().splitlines()


def test_a_container_sees_infiniband_where_the_node_has_it(tmp_path: Path) -> None:
    (tmp_path / "rdma_cm").touch()
    cases = [("image", "rdma_cm", "all"), ("image", "none", None), ("", "rdma_cm", None)]
    for container, device, expected in cases:
        started(tmp_path, "qwen3_8b", OBLR_CONTAINER=container, OBLR_RDMA=str(tmp_path / device))
        found = [line for line in (tmp_path / "srun.env").read_text().splitlines() if line.startswith("MELLANOX")]
        assert found == ([] if expected is None else [f"MELLANOX_VISIBLE_DEVICES={expected}"])


def test_a_container_has_the_run_directory_and_the_logs_where_the_host_has_them(tmp_path: Path) -> None:
    """What a rank writes elsewhere in a container is lost with it."""
    run_dir = tmp_path / "scratch" / "run"
    started(tmp_path, "qwen3_8b", f"run_dir={run_dir}", OBLR_CONTAINER="image", OBLR_CONTAINER_MOUNTS="/data:/data")
    logs = tmp_path / "oblr-5.logs" / "attempt_0"
    mounts = [f"{ROOT}:{ROOT}", "/data:/data", f"{run_dir}:{run_dir}", f"{logs}:{logs}"]
    assert f"--container-mounts={','.join(mounts)} " in (tmp_path / "srun.calls").read_text()
    assert run_dir.is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    started(tmp_path, "qwen3_8b", f"run_dir={tmp_path}/link/run", OBLR_CONTAINER="image")
    places = f"{ROOT}:{ROOT},{run_dir}:{run_dir},{run_dir}:{tmp_path}/link/run,"
    assert places in (tmp_path / "srun.calls").read_text().splitlines()[-1], "the container does not have the link"
    (tmp_path / "disk").mkdir()
    (run_dir / "hf").symlink_to("../../disk")
    started(tmp_path, "qwen3_8b", f"run_dir={run_dir}", OBLR_CONTAINER="image")
    assert f",{tmp_path}/disk:{tmp_path}/disk " in (tmp_path / "srun.calls").read_text().splitlines()[-1]
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "home").symlink_to(tmp_path / "real")
    run_dir, home = tmp_path / "real" / "run", str(tmp_path / "home")
    started(tmp_path, "qwen3_8b", f"run_dir={home}/run", OBLR_CONTAINER="image", OBLR_HOME=home)
    assert f"{home}:{home},{run_dir}:{run_dir}," in (tmp_path / "srun.calls").read_text().splitlines()[-1]
    (tmp_path / "file").touch()
    refused = started(tmp_path, "qwen3_8b", f"run_dir={tmp_path}/file/run", OBLR_CONTAINER="image")
    assert refused.returncode == 2 and f"error: cannot make {tmp_path}/file/run on node. Fix:" in refused.stderr


def test_tasks_run_in_the_environment_of_make_gpu_env(tmp_path: Path) -> None:
    """A shell that was opened later has no OBLR_VENV."""
    python = tmp_path / "home" / ".venv-gpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "home" / "slurm").symlink_to(ROOT / "slurm")
    for settings, expected in (({}, str(python)), ({"OBLR_PYTHON": "/own/python"}, "/own/python")):
        started(tmp_path, "qwen3_8b", OBLR_HOME=str(tmp_path / "home"), VIRTUAL_ENV="", **settings)
        assert f" {expected} " in (tmp_path / "srun.calls").read_text().splitlines()[-1]


def test_tasks_read_the_cache_that_the_docs_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that was opened later has no HF_HOME."""
    monkeypatch.delenv("HF_HOME", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    (home / "slurm").symlink_to(ROOT / "slurm")
    cases: list[tuple[dict[str, str], list[str]]] = [({}, []), ({}, [f"HF_HOME={home}/models/hub"])]
    for settings, expected in [*cases, ({"HF_HOME": "/own"}, ["HF_HOME=/own"])]:
        started(tmp_path, "qwen3_8b", OBLR_HOME=str(home), **settings)
        found = (tmp_path / "srun.env").read_text().splitlines()
        assert [line for line in found if line.startswith("HF_HOME=")] == expected
        (home / "models" / "hub").mkdir(parents=True, exist_ok=True)


def test_tasks_may_open_as_many_files_as_the_hard_limit_allows(tmp_path: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most[1]))
    try:
        started(tmp_path, "qwen3_8b", srun='ulimit -n >"$0.files"; exit 3')
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert (tmp_path / "srun.files").read_text() == f"{most[1]}\n"


def test_nodes_without_a_report_are_named(tmp_path: Path) -> None:
    """srun's errors name lists of nodes, and gpu1 is no part of gpu10."""
    for command, text in (
        ("scontrol", """case "$3" in "gpu[2-3],gpu10") printf 'gpu2\ngpu3\ngpu10\n' ;; *) echo "$3" ;; esac"""),
        ("srun", """echo 'srun: error: gpu[2-3],gpu10: tasks 1-3: Exited with exit code 1' >&2; exec sleep 50"""),
    ):
        (tmp_path / command).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / command).chmod(0o755)
    launched = """source <(sed 's/REPORT_S=30/REPORT_S=0/' slurm/lib.sh)
    nodes=(gpu1 gpu2 gpu3 gpu10) logs="$1" cpu_bind=() container=() gpus=0 ranks=1 all=() port=1 attempt=0 overrides=()
    python=python3 OBLR_CONFIG=none SLURM_JOB_ID=5
    oblr_await oblr_launch 2>>"$logs/srun.log" || true"""
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-c", launched, "job", str(tmp_path)], cwd=ROOT, env=os.environ | own, check=True, timeout=60
    )
    assert "for 0 s there was no report of: gpu1\n" in (tmp_path / "srun.log").read_text()


@pytest.mark.parametrize("at", ["show hostnames", "show config", "rev-parse", "runs/"])
def test_a_signal_while_no_task_runs_starts_no_training(tmp_path: Path, at: str) -> None:
    """The last one comes while the script reads status.json, just before it starts the ranks."""
    srun = 'for _ in $(seq 50); do sleep 0.1; done; touch "$0.done"\n'
    done = started(tmp_path, "qwen3_8b", srun=srun, SIGNAL_AT=at, SLURM_JOB_END_TIME=f"{time.time() + 5000:.0f}")
    assert done.returncode == 0 and "the job is requeued" in done.stdout, done.stderr
    assert "scontrol requeue 5" in (tmp_path / "scontrol.calls").read_text()
    assert not (tmp_path / "srun.done").exists()


def test_a_signal_before_the_margin_is_known_came_at_once(tmp_path: Path) -> None:
    done = started(tmp_path, "qwen3_8b", SIGNAL_AT="show hostnames")
    assert done.returncode == 2 and "--time is not longer than the margin of --signal (600 s)" in done.stderr


def test_the_wait_for_servers_ends_with_the_servers(tmp_path: Path) -> None:
    srun = 'case "$*" in *"servers start"*) exit 1 ;; *"servers wait"*) exec sleep 50 ;; esac\n'
    done = started(tmp_path, "servers", "qwen3_8b", srun=srun)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: all servers have ended, see ")
    assert "oblr_megatron.step_loop" not in (tmp_path / "srun.calls").read_text()


def test_the_wait_for_servers_goes_on_while_one_runs(tmp_path: Path) -> None:
    srun = 'case "$*" in *"servers start"*) exec sleep 50 ;; *"servers wait"*) sleep 3 ;; *) exit 3 ;; esac\n'
    started(tmp_path, "servers", "qwen3_8b", srun=srun)
    assert "oblr_megatron.step_loop" in (tmp_path / "srun.calls").read_text()


@pytest.mark.parametrize("form", [None, "relative", "%a %T"])
def test_the_end_of_the_job_is_read_in_every_format_of_times(tmp_path: Path, form: str | None) -> None:
    """SLURM 22.05 does not set SLURM_JOB_END_TIME; scontrol's times follow SLURM_TIME_FORMAT."""
    times = '[ "${SLURM_TIME_FORMAT:-standard}" = standard ] && at=2026-11-27T15:00:00 || at="Fri 15:00:00"\n'
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\n{times}echo "   StartTime=$at EndTime=$at Deadline=N/A"\n')
    (tmp_path / "scontrol").chmod(0o755)
    own = {"SLURM_JOB_ID": "5", "PATH": f"{tmp_path}:{os.environ['PATH']}", "TZ": "UTC"}
    own |= {} if form is None else {"SLURM_TIME_FORMAT": form}
    command = ["bash", "-c", 'source slurm/lib.sh; oblr_time; echo "$SLURM_JOB_END_TIME"']
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    assert datetime.fromtimestamp(int(done.stdout), UTC) == datetime(2026, 11, 27, 15, tzinfo=UTC)
