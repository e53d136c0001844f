"""A local stand-in for the SLURM commands of the job scripts: sbatch, srun, scontrol.

Tasks are processes of this machine. Nodes are names of its loopback interface: 127.0.0.1, 127.0.0.2, ... Each node may
have its own disk (its tasks then start in DISKS/NODE) and its own environment, as from a TaskProlog. The behaviour
follows sbatch(1), srun(1) and scontrol(1):

- sbatch runs a copy of the script from a spool directory, with SLURM's variables and `SLURM_RESTART_COUNT`;
- srun starts one process group per task, writes output to files by pattern, forwards SIGUSR1, ends the tasks on
  SIGTERM, and with --kill-on-bad-exit ends all tasks if one fails; it returns the highest status of its tasks;
- scontrol requeue ends the script and starts it again.

Queues, time, memory, accounting, containers and several machines are not simulated. `STANDIN` is the directory of
settings.json and of all output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOB_S = 3600.0  # a job's time limit
KILL_S = 5.0  # between SIGTERM and SIGKILL
SPOOLED, REQUEUE, RESTARTS = "job_script", "requeue", 10


def home() -> Path:
    return Path(os.environ["STANDIN"])


def settings() -> dict[str, Any]:
    """Keys: nodes, server_nodes (of a heterogeneous job), absent (nodes where tasks never start), disks, prolog."""
    return json.loads((home() / "settings.json").read_text())


def sbatch(arguments: list[str]) -> int:
    """Run a job to its end, requeues included, with output in STANDIN/job.out; return the last attempt's status."""
    given, header = settings(), Path(arguments[0]).read_text()
    name = re.findall(r"#SBATCH --job-name=(\S+)", header)[0]
    spooled = home() / SPOOLED
    shutil.copy(arguments[0], spooled)
    variables = {
        "SLURM_JOB_ID": str(given["job_id"]),
        "SLURM_JOB_NAME": name,
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_JOB_NODELIST": given["nodes"],
        "SLURM_CPUS_ON_NODE": "1",
    }
    if "server_nodes" in given:
        variables |= {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": given["nodes"]}
        variables |= {"SLURM_JOB_NODELIST_HET_GROUP_1": given["server_nodes"]}
    for attempt in range(RESTARTS):
        restarted = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        with (home() / "job.out").open("ab") as output:
            job = subprocess.Popen(
                ["bash", str(spooled), *arguments[1:]],
                env=os.environ | variables | restarted,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        (home() / "job.pid").write_text(f"{job.pid}")
        while job.poll() is None and not (home() / REQUEUE).exists():
            time.sleep(0.02)
        if not (home() / REQUEUE).exists():
            return job.returncode
        end([job])
        (home() / REQUEUE).unlink()
    return 1


def srun(arguments: list[str]) -> int:
    """Start the tasks and wait for them."""
    options, command = parsed(arguments)
    given = settings()
    group = "server_nodes" if options.het_group == 1 else "nodes"
    names = options.nodelist.split(",") if options.nodelist else hostnames(given[group])
    names = names[: options.nodes]
    tasks: list[subprocess.Popen[bytes]] = []
    ending: list[bool] = []

    def hand_on(number: int, frame: object) -> None:
        if number == signal.SIGTERM:
            ending.append(True)
        for task in tasks:
            os.killpg(task.pid, number) if task.poll() is None else None

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, hand_on)
    count = len(names) * options.ntasks_per_node
    for node, name in enumerate(names):
        for local in range(options.ntasks_per_node):
            rank = node * options.ntasks_per_node + local
            if name in given.get("absent", ()):
                tasks.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
                continue
            where = Path(given["disks"]) / name if "disks" in given else Path.cwd()
            log = options.output.replace("%n", str(node)).replace("%t", str(rank))
            with open(log, "ab") as output:
                tasks.append(
                    subprocess.Popen(
                        command,
                        cwd=where,
                        env=os.environ
                        | given.get("prolog", {}).get(name, {})
                        | variables(node, rank, local, count, name, len(names)),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
    return wait(tasks, kill=options.kill_on_bad_exit == 1, ending=ending)


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options and the command; unknown options are refused."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for name in ("nodes", "ntasks", "ntasks-per-node", "het-group", "kill-on-bad-exit", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("nodelist", "output", "input", "cpu-bind", "gpu-bind", "gpus-per-node"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    assert options.command and options.output, "a command and a file"
    return options, options.command


def variables(node: int, rank: int, local: int, count: int, name: str, nodes: int) -> dict[str, str]:
    numbers = {"PROCID": rank, "NODEID": node, "LOCALID": local, "NTASKS": count, "NNODES": nodes}
    return {f"SLURM_{key}": str(value) for key, value in numbers.items()} | {"SLURMD_NODENAME": name}


def wait(tasks: list[subprocess.Popen[bytes]], *, kill: bool, ending: list[bool]) -> int:
    """The tasks' highest status; 128 + N for a task killed by signal N."""
    while any(task.poll() is None for task in tasks):
        if ending or (kill and any(task.poll() for task in tasks)):
            bad = max((status(task) for task in tasks if task.poll() is not None), default=0)
            end(tasks)
            return bad or 128 + signal.SIGTERM
        time.sleep(0.02)
    return max(status(task) for task in tasks)


def status(task: subprocess.Popen[bytes]) -> int:
    code = task.wait()
    return code if code >= 0 else 128 - code


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to the process groups, and later SIGKILL to the rest."""
    for number, deadline in ((signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            os.killpg(process.pid, number)
        until = time.monotonic() + deadline
        while any(process.poll() is None for process in alive) and time.monotonic() < until:
            time.sleep(0.02)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join(hostnames(arguments[2])))
        return 0
    if arguments[:2] == ["show", "job"]:
        ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + JOB_S))
        print(f"JobId={arguments[2]}\n   StartTime=Unknown EndTime={ends} Deadline=N/A")
        return 0
    if arguments[0] == "requeue" and arguments[1] == str(settings()["job_id"]):
        (home() / REQUEUE).touch()
        return 0
    print(f"scontrol: error: {arguments}", file=sys.stderr)
    return 1


def hostnames(expression: str) -> list[str]:
    """`127.0.0.[1-3,7]` -> 127.0.0.1, 127.0.0.2, 127.0.0.3, 127.0.0.7; names without brackets are split at commas."""
    match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\]", expression)
    if match is None:
        return expression.split(",")
    names = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        names += [f"{match[1]}{number}" for number in range(int(first), int(last or first) + 1)]
    return names


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
