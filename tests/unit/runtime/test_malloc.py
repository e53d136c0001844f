"""Memory that the C library keeps. Oracle: the page faults that the kernel counts for a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CHURN = """
import json, resource
from oblr_megatron.runtime.malloc import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 2**20 for _ in range(64)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
default = faults()
kept = keep_freed_memory()
faults()
print(json.dumps([kept, default, faults()]))
"""


def churn(**environment: str) -> tuple[bool, int, int]:
    """Whether the thresholds changed, and page faults of 64 MiB in blocks of 1 MiB, before and after."""
    done = subprocess.run([sys.executable, "-c", CHURN], env=environment, capture_output=True, check=True, text=True)
    kept, before, after = json.loads(done.stdout)
    return kept, before, after


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = 64 * 2**20 // 4096
    kept, before, after = churn()
    assert kept and before > 0.9 * pages and after < 0.1 * pages


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str) -> None:
    assert not churn(**{name: "1" if name.startswith("M") else "glibc.malloc.trim_threshold=1"})[0]
