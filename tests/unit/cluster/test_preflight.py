"""What the preflight concludes from the nodes' reports, and how the nodes meet.

The whole of it on several nodes is in tests/e2e/test_slurm.py. Not covered: GPUs, NCCL.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.cluster import all_reduce, preflight
from oblr_megatron.cluster.all_reduce import ReduceError
from oblr_megatron.cluster.node import Problem, Report, examine, versions
from oblr_megatron.cluster.rendezvous import Rendezvous
from oblr_megatron.errors import RunError
from tests.distributed.launch import run_ranks

NODES = ["a", "b", "c"]
SMI = """#!/bin/sh
echo "570.86.15, 4, 81559, 9.0, NVIDIA H100 80GB HBM3"
echo "570.86.15, 40213, 81559, 9.0, NVIDIA H100 80GB HBM3"
"""


def reports(**versions: str) -> dict[int, Report]:
    return {index: Report(name, same={"torch": versions.get(name, "2.13.0")}) for index, name in enumerate(NODES)}


def compared(found: dict[int, Report], offsets: dict[int, float] | None = None) -> list[str]:
    preflight.compare(found, offsets or {}, NODES, 60.0)
    return preflight.lines(found, NODES)


def test_equal_nodes_are_ready() -> None:
    found = reports()
    assert compared(found, {0: 0.0, 1: 4.9, 2: -4.9}) == [] and preflight.scored(found) == preflight.GOOD


def test_a_node_knows_its_place() -> None:
    assert [preflight.index_of(NODES, {"SLURMD_NODENAME": name, "SLURM_NODEID": "0"}) for name in NODES] == [0, 1, 2]
    assert preflight.index_of(NODES, {"SLURMD_NODENAME": "elsewhere", "SLURM_NODEID": "2"}) == 2


def test_the_odd_one_is_named_even_if_it_is_the_first() -> None:
    for odd, other in (("a", "b"), ("c", "a")):
        (line,) = compared(reports(**{odd: "2.12.0"}))
        expected = f"node {odd}: torch is 2.12.0, on {other} it is 2.13.0; install or copy the same on all nodes"
        assert line == expected


def test_a_clock_that_is_off_and_a_node_that_is_not_there() -> None:
    found = reports()
    del found[1]
    silent, late = compared(found, {0: 0.0, 2: -61.2})
    assert silent == ("node b: did not report within 60 s; look whether the node is up, or exclude it (--exclude)")
    assert late == "node c: the clock is 61 s behind that of a; synchronise it (chrony, NTP)"
    rows = preflight.table(found, NODES).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == NODES and [row.split()[-1] for row in rows[1:4]] == [
        "ok",
        "FAILS",
        "FAILS",
    ]


def test_a_report_travels_whole() -> None:
    report = Report("a", {"GPUs": "CPU"}, {"torch": "2.13.0"}, [Problem("what", "mend")])
    assert Report.load(report.dump()) == report


def test_gpus_that_are_missing_or_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an nvidia-smi of the test's own, on a machine where torch sees no GPU."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = examine("a", tmp_path / "none.toml", [], expect_gpus=8, ports=())
    said = [problem.what for problem in found.problems]
    assert f"torch sees {torch.cuda.device_count()} GPUs, not 8" in said
    assert "GPUs are in use (GPU 1: 40213 MiB)" in said
    assert any("cannot read the config" in what for what in said)
    assert found.same["driver"] == "570.86.15" and found.same["compute capability"] == "9.0"
    assert found.same["GPU kind"] == "NVIDIA H100 80GB HBM3"


def test_no_driver_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examine("a", tmp_path / "none.toml", [], expect_gpus=8, ports=())
    assert "nvidia-smi does not answer" in [problem.what for problem in found.problems]


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = examine("a", tmp_path / "none.toml", [], expect_gpus=0, ports=(port,))
    assert any(f"cannot listen on port {port}" in problem.what for problem in found.problems)


def test_versions_name_what_runs_here() -> None:
    found = versions()
    assert found["torch"] == torch.__version__ or found["torch"] in torch.__version__
    assert found["oblr-megatron"] != "none" and found["vllm"] != "none" and len(found["code"]) == 12


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def test_nodes_meet_and_hear_the_first_one() -> None:
    port = free_port()

    def take_part(index: int) -> tuple[dict[int, str], dict[int, float], str]:
        with Rendezvous(["127.0.0.1", "127.0.0.2"], index, port, 20.0) as rendezvous:
            heard = rendezvous.gather("report", f"from {index}")
            return heard, rendezvous.clock_offsets(heard), rendezvous.tell("verdict", f"verdict of {index}")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take_part, range(2))
    assert first[0] == {0: "from 0", 1: "from 1"} and second[0] == {1: "from 1"}
    assert first[2] == second[2] == "verdict of 0"
    assert first[1][0] == 0 and abs(first[1][1]) < 5


def test_no_wait_is_endless() -> None:
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"node b did not meet 127\.0\.0\.1:"):
        Rendezvous(["127.0.0.1", "b"], 1, free_port(), 1.0)
    rendezvous = Rendezvous(["127.0.0.1", "b"], 0, free_port(), 0.5)
    assert rendezvous.gather("report", "own") == {0: "own"}
    assert time.monotonic() - begin < 30


def test_sums_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(speed.over_nodes > 0 == speed.within_node for speed in run_ranks(_measured, 2))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor[5:6].add_(1))
    with pytest.raises(ReduceError, match="all-reduce here: 1 of 262144 sums are wrong on cpu"):
        all_reduce._one(dist.HashStore(), 0, 1, "here", 10.0)
    assert not dist.is_initialized()


def _measured() -> all_reduce.Speed:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.barrier()  # the other has its connections
    dist.destroy_process_group()
    return all_reduce.measure(store, rank, size, 0, 1, 60.0)
