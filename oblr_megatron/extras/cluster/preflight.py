"""Checks every node of a job before any rank starts; runs as one process per node (slurm/lib.sh).

    srun --ntasks-per-node=1 python -m oblr_megatron.extras.cluster.preflight CONFIG.toml [section.key=value ...]

Each node examines itself (node.py). The first node compares versions and clocks. Then all nodes run an all-reduce with
gloo, and one with NCCL over all GPUs. The first node prints a table, and one line per problem with node and fix. The
exit status is 2 if there is a problem. Every wait has a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from oblr_megatron.errors import EXIT_OK, EXIT_USER, Problem
from oblr_megatron.extras.cluster.all_reduce import GRACE_S, ReduceError, Speed, measure_gloo, measure_gpus
from oblr_megatron.extras.cluster.node import NodeReport, check_open_files, examine
from oblr_megatron.extras.cluster.rendezvous import Rendezvous
from oblr_megatron.runtime.command_line import guarded, parse
from oblr_megatron.runtime.processes import raise_open_files

CLOCK_S = 5.0  # allowed clock difference, because file times and logs are compared across nodes
GOOD, BAD = "ready", "not ready"
LINKS = "check the links (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME), or exclude the node"
NAMES = (
    "set GLOO_SOCKET_IFNAME to the interface between the nodes (ip -br address): gloo takes the address of a node's "
    "own name, and /etc/hosts may make that a loopback address"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status, equal on every node: 0 if all nodes are ready."""
    raise_open_files()  # the first node's store has connections to every process
    return guarded(lambda: run(parse(_parser(), arguments)))


def run(options: argparse.Namespace) -> int:
    """This node's part of the preflight."""
    nodes = options.nodes.split(",")
    index = index_of(nodes, os.environ)
    ports = () if index or options.rendezvous_port is None else (options.rendezvous_port,)
    torch.set_num_threads(1)
    with Rendezvous(nodes, index, options.port, options.deadline) as rendezvous:
        report = examine(nodes[index], options.config, options.overrides, expect_gpus=options.expect_gpus, ports=ports)
        check_open_files(report, len(nodes) * (options.expect_gpus or options.ranks_per_node))
        reports = {
            node: NodeReport.load(text)
            for node, text in rendezvous.gather("report", json.dumps(asdict(report))).items()
        }
        offsets = rendezvous.clock_offsets(reports)
        if index == 0:
            compare(reports, offsets, nodes, options.deadline)
        outcome = rendezvous.tell("outcome", outcome_of(reports), 2 * options.deadline)
        if outcome == GOOD:
            _reduce(rendezvous, reports, options)
            outcome = rendezvous.tell("final outcome", outcome_of(reports), 5 * options.deadline + GRACE_S)
        if index == 0:
            print(table(reports, nodes))
            for line in lines(reports, nodes):
                print(f"error: {line}", file=sys.stderr)
            print(f"preflight: {len(nodes)} nodes {outcome}", flush=True)
    return EXIT_OK if outcome == GOOD else EXIT_USER


def _parser() -> argparse.ArgumentParser:
    environment = os.environ
    parser = argparse.ArgumentParser(prog="oblr_megatron.extras.cluster.preflight", description="one node's preflight")
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of config keys")
    parser.add_argument(
        "--nodes", default=environment.get("SLURMD_NODENAME", "localhost"), help="comma-separated names"
    )
    parser.add_argument("--expect-gpus", type=int, default=8, help="GPUs per node; 0 for CPU ranks")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="CPU ranks per node")
    parser.add_argument("--port", type=int, default=29400, help="port of the preflight's store")
    parser.add_argument("--rendezvous-port", type=int, help="port of the run; must be free on the first node")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds, for every wait")
    parser.add_argument("--min-gb-s", type=float, default=0.0, help="required bus bandwidth of the all-reduces")
    return parser


def index_of(nodes: Sequence[str], environment: Mapping[str, str]) -> int:
    """This node's index, by its name or else from SLURM_NODEID.

    >>> index_of(["a", "b"], {"SLURMD_NODENAME": "b"}), index_of(["a", "b"], {"SLURM_NODEID": "1"}), index_of(["a"], {})
    (1, 1, 0)
    """
    name = environment.get("SLURMD_NODENAME", "")
    return nodes.index(name) if name in nodes else int(environment.get("SLURM_NODEID", "0"))


def compare(
    reports: dict[int, NodeReport], offsets: Mapping[int, float], nodes: Sequence[str], deadline_s: float
) -> None:
    """Add the problems that show only in comparison: missing nodes, differing versions, clock differences."""
    for node, name in enumerate(nodes):
        if node not in reports:
            reports[node] = NodeReport(name)
            _add_silence(reports[node], deadline_s)
    for key in {key: None for report in reports.values() for key in report.same}:
        values = [(node, report.same[key]) for node, report in sorted(reports.items()) if key in report.same]
        common = Counter(value for _, value in values).most_common(1)[0][0]  # on a tie, the first node's value
        like = next(nodes[node] for node, value in values if value == common)
        for node, value in values:
            if value != common:
                what = f"{key} is {value}, but {common} on {like}"
                reports[node].add(what, "install or copy the same version on all nodes")
    for node, offset in offsets.items():
        reports[node].facts["clock"] = f"{offset:+.1f} s"
        if abs(offset) > CLOCK_S:
            what = f"the clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} that of {nodes[0]}"
            reports[node].add(what, "synchronise the clocks (chrony, NTP)")


def _add_silence(report: NodeReport, deadline_s: float) -> None:
    report.add(f"no report within {deadline_s:g} s", "check that the node is up, or exclude it (--exclude)")


def _reduce(rendezvous: Rendezvous, reports: dict[int, NodeReport], options: argparse.Namespace) -> None:
    """Run the all-reduces; the first node adds speeds and failures of all nodes to their reports."""
    failures: list[Problem] = []
    node, nodes, deadline_s = rendezvous.index, len(rendezvous.nodes), options.deadline
    speed = Speed(0.0, 0.0)
    try:
        speed = measure_gloo(rendezvous.store, node, nodes, deadline_s)
    except ReduceError as error:
        failures = [(str(error), NAMES)]
    if options.expect_gpus:
        speed, failed = measure_gpus(rendezvous.address, node, nodes, options.expect_gpus, deadline_s)
        failures += [(what, LINKS) for what in failed]
    answers = rendezvous.gather("reduced", json.dumps([asdict(speed), failures]), 4 * deadline_s + GRACE_S)
    for index, report in reports.items():
        if index not in answers:
            _add_silence(report, 4 * deadline_s + GRACE_S)
            continue
        speeds, problems = json.loads(answers[index])
        for what, fix in problems:
            report.add(what, fix)
        for name, value in speeds.items():
            report.facts[f"{name.replace('_', ' ')}, GB/s"] = f"{value:.2f}" if value else "-"
            if 0 < value < options.min_gb_s:
                report.add(f"all-reduce {name.replace('_', ' ')}: {value:.1f} GB/s, below {options.min_gb_s:g}", LINKS)


def outcome_of(reports: Mapping[int, NodeReport]) -> str:
    """GOOD if no report has a problem, else BAD."""
    return BAD if any(report.problems for report in reports.values()) else GOOD


def table(reports: Mapping[int, NodeReport], nodes: Sequence[str]) -> str:
    """One row per node; "-" for a missing fact. A last line has the versions."""
    facts = list({fact: None for report in reports.values() for fact in report.facts})
    rows = [["node", *facts, ""]]
    for node, name in enumerate(nodes):
        report = reports[node]
        rows.append([name, *(report.facts.get(fact, "-") for fact in facts), "FAILS" if report.problems else "ok"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    shared = next(iter(reports.values())).same
    return text + "\n" + ", ".join(f"{name} {value}" for name, value in shared.items())


def lines(reports: Mapping[int, NodeReport], nodes: Sequence[str]) -> list[str]:
    """One line per problem."""
    return [
        f"node {nodes[node]}: {what}. Fix: {fix}"
        for node, report in sorted(reports.items())
        for what, fix in report.problems
    ]


if __name__ == "__main__":
    sys.exit(main())
