"""The table of all ranks, from gathered rows to logged metrics; memory and probe of this process.

Not covered: the gather and real ranks (tests/distributed/test_rank_timers.py); memory and probe on a GPU.
"""

from __future__ import annotations

import json
import mmap

from oblr_megatron.metrics import describe
from oblr_megatron.observe.performance.ranks import RankTable, memory_now, row_of


def table() -> RankTable:
    """Three ranks; the last is slow, and only rank 0 has a "reward" phase."""
    rows = [
        row_of({"gradient": 3.0, "reward": 0.5}, {"gradient": 1.0, "reward": 0.25}, (10, 20, 31), 1.0),
        row_of({"gradient": 3.0}, {"gradient": 1.5}, (11, 21, 40), 2.0),
        row_of({"gradient": 3.0}, {"gradient": 2.5}, (12, 22, 32), 3.0),
    ]
    return RankTable.of(rows)


def test_each_value_is_found_under_its_rank() -> None:
    line = json.loads(table().line(step=7))
    assert line == {
        "step": 7,
        "wall_s": {"reward": [0.5, 0.0, 0.0], "gradient": [3.0, 3.0, 3.0]},
        "own_s": {"reward": [0.25, 0.0, 0.0], "gradient": [1.0, 1.5, 2.5]},
        "memory_bytes": {"allocated": [10, 11, 12], "reserved": [20, 21, 22], "peak": [31, 40, 32]},
        "pace_s": [1.0, 2.0, 3.0],
    }


def test_metrics_name_the_slowest_ranks() -> None:
    found = table().metrics()
    assert found == {
        "perf/peak_memory_bytes": 40,
        "perf/peak_memory_rank": 1,
        "perf/ranks/reward/max_s": 0.25,
        "perf/ranks/reward/min_s": 0.0,
        "perf/ranks/reward/slowest": 0,
        "perf/ranks/gradient/max_s": 2.5,
        "perf/ranks/gradient/min_s": 1.0,
        "perf/ranks/gradient/slowest": 2,
        "perf/slowest_rank": 2,
        "perf/slowest_rank_ratio": 1.5,
    }
    assert all(describe(name) for name in found)


def test_a_single_rank_logs_only_memory() -> None:
    row = row_of({"gradient": 3.0}, {"gradient": 1.0}, (10, 20, 31), 1.0)
    assert RankTable.of([row]).metrics() == {"perf/peak_memory_bytes": 31}


def test_ranks_that_trained_nothing_have_no_pace() -> None:
    row = row_of({"rollout": 3.0}, {"rollout": 1.0}, (10, 20, 31), 0.0)
    assert "perf/slowest_rank" not in RankTable.of([row, row]).metrics()


def test_seconds_are_written_to_four_digits() -> None:
    row = row_of({"push": 0.123456789}, {"push": 0.0}, (1, 1, 1), 12345.678)
    line = json.loads(RankTable.of([row]).line(1))
    assert line["wall_s"]["push"] == [0.1235] and line["pace_s"] == [12350.0]


def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    """Mapped pages are new, while malloc may take some that earlier tests have freed."""
    size = 2**26
    before, _, peak_before = memory_now()
    with mmap.mmap(-1, size) as held:
        held.write(b"x" * size)
        after, _, peak = memory_now()
    assert after - before > 0.9 * size
    assert peak >= after and peak >= peak_before
