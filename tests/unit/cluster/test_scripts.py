"""The job scripts as text: equal except for settings, with headers that fit the configs.

tests/e2e/test_slurm.py executes them under a real SLURM.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from oblr_megatron.checks.layout import check_world_size
from oblr_megatron.config import Config, load_config

ROOT = Path(__file__).resolve().parents[3]
SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b_a3b", "235b_a22b")
NAMES = (*(f"qwen3_{size}" for size in SIZES), "qwen2.5_7b", "qwen2.5_32b", "llama3.1_8b")
BASH = [*sorted((ROOT / "slurm").glob("*.sh")), *sorted((ROOT / "tests/slurm").glob("*.sh"))]
SCONTROL = """#!/bin/sh
[ "$2" = hostnames ] && echo node
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
    assert found == {*NAMES, "servers"}


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


@pytest.mark.parametrize("name", NAMES)
def test_servers_take_every_preset(name: str) -> None:
    """Past the preset, outside a job, the script stops at the missing SLURM_JOB_ID."""
    environment = {"PATH": os.environ["PATH"], "OBLR_HOME": str(ROOT)}
    found = subprocess.run(
        ["bash", script("servers"), name], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and "SLURM_JOB_ID is not set" in found.stderr


@pytest.mark.parametrize("path", BASH, ids=lambda path: path.name)
def test_bash_syntax(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.name == "lib.sh" or os.access(path, os.X_OK)


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


def started(directory: Path, name: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Start a script by a relative path in a job of two components, where every srun fails."""
    for command, text in (("scontrol", SCONTROL), ("srun", "#!/bin/sh\nexit 3\n")):
        (directory / command).write_text(text)
        (directory / command).chmod(0o755)
    own = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NODELIST_HET_GROUP_1": "node"}
    own |= {"SLURM_JOB_END_TIME": f"{time.time() + 300:.0f}", "PATH": f"{directory}:{os.environ['PATH']}"}
    own |= {"OBLR_HOME": str(ROOT), "OBLR_LOGS": str(directory), "OBLR_DRY_RUN": "0", "OBLR_PREFLIGHT": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "OBLR_"))}
    command = ["bash", f"./{script(name).name}", *words]
    return subprocess.run(
        command, cwd=ROOT / "slurm", env=kept | own | settings, capture_output=True, text=True, check=False
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
    ],
)
def test_numbers_are_checked(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    done = started(tmp_path, "servers", "qwen3_8b", **settings)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
