"""The preflight's conclusions from the nodes' reports, and the rendezvous of the nodes.

tests/e2e/test_slurm.py runs the whole preflight on several nodes. Not covered: GPUs, NCCL.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from oblr_megatron.errors import RunError
from oblr_megatron.extras.cluster import all_reduce, preflight, rendezvous
from oblr_megatron.extras.cluster.all_reduce import ReduceError
from oblr_megatron.extras.cluster.node import NodeReport, check_open_files, examine, versions
from oblr_megatron.extras.cluster.rendezvous import Rendezvous
from tests.distributed.launch import run_ranks
from tests.ports import free_port

NODES = ["a", "b", "c"]
SMI = """#!/bin/sh
echo "570.86.15, 4, 81559, 9.0, NVIDIA H100 80GB HBM3"
echo "570.86.15, 40213, 81559, 9.0, NVIDIA H100 80GB HBM3"
"""


def reports(**versions: str) -> dict[int, NodeReport]:
    return {index: NodeReport(name, same={"torch": versions.get(name, "2.13.0")}) for index, name in enumerate(NODES)}


def compared(found: dict[int, NodeReport], offsets: dict[int, float] | None = None) -> list[str]:
    preflight.compare(found, offsets or {}, NODES, 60.0)
    return preflight.lines(found, NODES)


def test_equal_nodes_are_ready() -> None:
    found = reports()
    assert compared(found, {0: 0.0, 1: 4.9, 2: -4.9}) == [] and preflight.outcome_of(found) == preflight.GOOD


def test_a_node_finds_its_index() -> None:
    assert [preflight.index_of(NODES, {"SLURMD_NODENAME": name, "SLURM_NODEID": "0"}) for name in NODES] == [0, 1, 2]
    assert preflight.index_of(NODES, {"SLURMD_NODENAME": "elsewhere", "SLURM_NODEID": "2"}) == 2


def test_the_differing_node_is_named_even_if_it_is_the_first() -> None:
    for odd, other in (("a", "b"), ("c", "a")):
        found = reports(**{odd: "2.12.0"})
        assert len(compared(found)) == 1
        ((what, fix),) = found[NODES.index(odd)].problems
        assert what == f"torch is 2.12.0, but 2.13.0 on {other}" and fix


def test_a_wrong_clock_and_a_missing_node() -> None:
    found = reports()
    del found[1]
    silent, late = compared(found, {0: 0.0, 2: -61.2})
    assert silent.startswith("node b: ") and "60 s" in silent and "--exclude" in silent
    assert late.startswith("node c: ") and "61 s behind that of a" in late
    rows = preflight.table(found, NODES).splitlines()
    assert [(row.split()[0], row.split()[-1]) for row in rows[1:4]] == [("a", "ok"), ("b", "FAILS"), ("c", "FAILS")]


def test_a_report_survives_json() -> None:
    report = NodeReport("a", {"GPUs": "CPU"}, {"torch": "2.13.0"}, [("what", "fix")])
    assert NodeReport.load(json.dumps(asdict(report))) == report


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NodeReport]:
    """The report of a node with this nvidia-smi."""

    def report(smi: str, gpus: int = 8) -> NodeReport:
        (tmp_path / "nvidia-smi").write_text(smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return examine("a", tmp_path / "none.toml", [], expect_gpus=gpus, ports=())

    return report


def test_gpus_that_are_missing_or_in_use(reported: Callable[..., NodeReport], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where torch sees no GPU, and with a torch without CUDA, which fits any driver."""
    monkeypatch.setattr(torch.version, "cuda", None)
    found = reported(SMI)
    said = [what for what, _ in found.problems]
    assert f"torch sees {torch.cuda.device_count()} GPUs, not 8" in said
    assert "GPUs are in use (GPU 1: 40213 MiB)" in said
    assert any("cannot read the config" in what for what in said)
    assert found.same["driver"] == "570.86.15" and found.same["compute capability"] == "9.0"
    assert found.same["GPU kind"] == "NVIDIA H100 80GB HBM3"


def test_gpus_of_other_jobs_are_not_asked_about(
    reported: Callable[..., NodeReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ConstrainDevices nvidia-smi sees all GPUs of a node, and SLURM sets CUDA_VISIBLE_DEVICES alone."""
    monkeypatch.setattr(torch.version, "cuda", None)
    one, other = SMI.splitlines()[1:3]
    for own, busy in (("0", False), ("", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        found = reported(f'#!/bin/sh\n{one}\ncase "$*" in *--id=0*) ;; *) {other} ;; esac\n', gpus=1)
        assert any("GPUs are in use" in what for what, _ in found.problems) == busy


def test_a_gpu_that_names_no_memory_is_no_error(reported: Callable[..., NodeReport]) -> None:
    found = reported('#!/bin/sh\necho "580.65.06, [N/A], [N/A], 12.1, NVIDIA GB10"\n')
    assert found.facts["GPU free"] == "unknown" and found.same["GPU memory, MiB"] == "[N/A]"
    assert not [what for what, _ in found.problems if "in use" in what]


def test_an_old_driver_is_named(reported: Callable[..., NodeReport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # NVML's count
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = [what for what, _ in reported(SMI).problems]
    assert [what for what in said if "570.86.15" in what and "580" in what and "13.0" in what]
    assert not [what for what in said if "torch sees" in what]


def test_no_driver_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examine("a", tmp_path / "none.toml", [], expect_gpus=8, ports=())
    assert "nvidia-smi does not answer" in [what for what, _ in found.problems]


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = examine("a", tmp_path / "none.toml", [], expect_gpus=0, ports=(port,))
    assert any(f"cannot listen on port {port}" in what for what, _ in found.problems)


def test_data_sets_that_this_node_cannot_read_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+2=", "answer": "3"}\n')
    config = tmp_path / "config.toml"
    config.write_text(
        f"""run_dir = "{tmp_path}/run"
        model.path = "{tmp_path}/model"
        data.train = "{tmp_path}/rows.jsonl"
        data.exclude = ["{tmp_path}/none.jsonl"]
        evaluate.data = {{ gsm8k = "gsm8k" }}"""
    )
    found = [what for what, _ in examine("a", config, [], expect_gpus=0, ports=()).problems]
    assert [sum(name in what for what in found) for name in ("none.jsonl", "gsm8k", "rows.jsonl")] == [1, 1, 0]


def test_versions_are_those_installed() -> None:
    found = versions()
    assert found["torch"] and torch.__version__.startswith(found["torch"])
    assert found["oblr-megatron"] != "none" and found["vllm"] != "none" and len(found["code"]) == 12


def test_the_first_node_gathers_and_the_others_hear_it() -> None:
    port = free_port()

    def take_part(index: int) -> tuple[dict[int, str], dict[int, float], str]:
        with Rendezvous(["127.0.0.1", "127.0.0.2"], index, port, 20.0) as meeting:
            heard = meeting.gather("report", f"from {index}")
            return heard, meeting.clock_offsets(heard), meeting.tell("outcome", f"outcome of {index}")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(take_part, range(2))
    assert first[0] == {0: "from 0", 1: "from 1"} and second[0] == {1: "from 1"}
    assert first[2] == second[2] == "outcome of 0"
    assert first[1][0] == 0 and abs(first[1][1]) < 5


def test_a_silent_node_delays_no_report_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FAREWELL_S", 6.0)
    nodes, port, deadline_s = [f"127.0.0.{1 + index}" for index in range(5)], free_port(), 8.0

    def take_part(index: int) -> tuple[dict[int, float], str]:
        with Rendezvous(nodes, index, port, deadline_s) as meeting:
            time.sleep(0.5 if index == 0 else 0.0)  # the first node examines itself longest
            found = {node: NodeReport(text) for node, text in meeting.gather("report", nodes[index]).items()}
            offsets = meeting.clock_offsets(found)
            if index == 0:
                preflight.compare(found, offsets, nodes, deadline_s)
                assert preflight.lines(found, nodes)[0].startswith(f"node {nodes[4]}: no report within 8 s")
            return offsets, meeting.tell("outcome", preflight.outcome_of(found), 2 * deadline_s)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(take_part, range(4)))
    assert [outcome for _, outcome in outcomes] == [preflight.BAD] * 4 and sorted(outcomes[0][0]) == [0, 1, 2, 3]


def test_every_wait_has_a_deadline() -> None:
    with pytest.raises(RunError, match=r"node b .* 127\.0\.0\.1:\d+ in 1 s"):
        Rendezvous(["127.0.0.1", "b"], 1, free_port(), 1.0)
    first = Rendezvous(["127.0.0.1", "b"], 0, free_port(), 0.5)
    assert first.gather("report", "own") == {0: "own"}


def test_a_low_limit_of_open_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    found = NodeReport("a"), NodeReport("b")
    check_open_files(found[0], 896)
    check_open_files(found[1], 897)
    assert found[0].problems == []
    ((what, fix),) = found[1].problems
    assert what == "a process may open 4096 files, and 897 ranks need 4100" and "LimitNOFILE" in fix


def test_gloo_is_tried_also_on_gpus_and_its_failure_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two nodes with GPUs, where /etc/hosts maps the node's own name to a loopback address."""

    def gather(name: str, text: str, deadline_s: float) -> dict[int, str]:
        return {0: text, 1: json.dumps([{"within_node": 300.0, "over_nodes": 40.0}, []])}

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("connect [127.0.1.1]:36213: Connection refused")

    monkeypatch.setattr(dist, "init_process_group", refused)
    monkeypatch.setattr(preflight, "measure_gpus", lambda *_: (all_reduce.Speed(300.0, 41.0), []))
    meeting = SimpleNamespace(index=0, nodes=["a", "b"], store=dist.HashStore(), address="a:1", gather=gather)
    options = SimpleNamespace(expect_gpus=8, deadline=5.0, min_gb_s=0.0)
    found = {0: NodeReport("a"), 1: NodeReport("b")}
    preflight._reduce(meeting, found, options)  # type: ignore[arg-type]
    (line,) = preflight.lines(found, ["a", "b"])
    assert line.startswith("node a: gloo all-reduce over all nodes (2 processes): connect [127.0.1.1]:36213")
    assert "Fix: set GLOO_SOCKET_IFNAME" in line and found[0].facts["over nodes, GB/s"] == "41.00"


@pytest.mark.slow
def test_sums_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(speed.over_nodes > 0 == speed.within_node for speed in run_ranks(_measured, 2))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor[5:6].add_(1))
    with pytest.raises(ReduceError, match=r"here: 1 of 262144 sums .* cpu"):
        all_reduce._one("gloo", dist.HashStore(), 0, 1, "here", 10.0)
    assert not dist.is_initialized()


def test_what_nccl_prints_blocks_no_gpu_and_hides_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 ends after GPU 1, which prints more than a pipe holds; GPU 2 gives no answer."""
    fake = tmp_path / "python"
    fake.write_text(f"""#!/bin/sh
for local; do :; done
case $local in
    0) while [ ! -e {tmp_path}/done ]; do sleep 0.05; done ;;
    1) head -c 200000 /dev/zero | tr '\\0' x && echo && touch {tmp_path}/done ;;
    2) echo "node:7:7 [2] NCCL INFO Bootstrap" && echo "no device" >&2 && exit ;;
esac
echo '{{"within_node": 30'$local'.5, "over_nodes": 0.0}}'
echo "node:7:7 [0] NCCL INFO comm - Destroy COMPLETE"
""")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(all_reduce, "GRACE_S", 10.0)
    speed, failures = all_reduce.measure_gpus("127.0.0.1:1", 0, 1, 3, 0.0)
    assert speed == all_reduce.Speed(300.5, 0.0)
    assert failures == ["GPU 2: the all-reduce process exited with status 0: no device"]


def _measured() -> all_reduce.Speed:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.barrier()  # the other rank has connected
    dist.destroy_process_group()
    return all_reduce.measure_gloo(store, rank, size, 60.0)
