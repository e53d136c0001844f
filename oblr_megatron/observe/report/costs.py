"""Charts of what a step costs: time by phase and rank, device utilization, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oblr_megatron.metrics import RANKS_FILE, intact_lines
from oblr_megatron.observe.alarm_window import SLOWER
from oblr_megatron.observe.report.specs import ChartRule, Curve, Panel, chart, panel, strip
from oblr_megatron.timing import PHASES

TIME = chart(
    "Time by phase",
    "Seconds of each step by phase on rank 0, stacked, without evaluation. The legend shows averages. The strip shows, "
    "in the phase's colour, which rank took longest for its own work in rollout and gradient.",
    "A phase that grows while response length does not: memory pressure, a slow disk or a waiting rank. In the strip, "
    "marks that stay at one rank.",
)

MARKED = ("rollout", "gradient")  # marks of more phases would hide each other in the strip
RANKED = ("rollout", "gradnorm", "gradient")  # the phases that take long
MOST_RANKS = 8  # drawn: the ranks that held most in the last step

RANKS = chart(
    "Slow ranks",
    "Longest and, in the same colour, shortest time of any rank in a phase, without waiting where that is measured. "
    "The strips show the slowest rank's own training time over the median rank's, and which rank is slowest.",
    f"A ratio that stays above {SLOWER:g} at the same rank: all other ranks wait for it in every step.",
    panel(
        "s",
        *(
            Curve(f"perf/ranks/{phase}/{end}_s", label, "average", 1 + PHASES.index(phase))
            for phase in RANKED
            for end, label in (("max", phase), ("min", f"{phase}, least"))
        ),
        include=(0.0,),
    ),
    strip(
        "",
        Curve("perf/slowest_rank_ratio", "slowest over median", "average", 2),
        include=(1.0,),
        rules=(ChartRule("slow", SLOWER, forced=True),),
    ),
    strip("rank", Curve("perf/slowest_rank", "slowest rank", "dots", 2), include=(0.0, 1.0)),
)

UTILIZATION = chart(
    "Device utilization",
    "Model FLOPs of the samples trained on, divided by the devices' peak over the gradnorm, gradient and optimizer "
    "phases. The second curve counts a separate norms pass as useful work. The strip shows prompt and response tokens "
    "per second and rank over the whole step, without evaluation.",
    "Utilization that falls at constant length: microbatches too small, ranks that wait, or memory that is full.",
    panel(
        "MFU",
        Curve("perf/mfu/actor", "training", "average"),
        Curve("perf/mfu/with_norms", "with norms", "average", 3),
        include=(0.0,),
    ),
    strip("tokens/s", Curve("perf/throughput", "per rank", "average", 2), include=(0.0,)),
)

THROUGHPUT = chart(
    "Throughput and memory",
    "Response tokens and responses per second over the step without evaluation, and the largest peak memory of any "
    "trainer process. The last strip shows the memory each rank held after the step, for at most eight ranks.",
    "Throughput that falls at constant response length, or memory that keeps growing.",
    panel("tokens/s", Curve("perf/tokens_per_s", "tokens per second"), include=(0.0,)),
    strip("samples/s", Curve("perf/samples_per_s", "responses per second", colour=2), include=(0.0,)),
    strip("GiB", Curve("perf/peak_memory_bytes", "peak memory", "line", 3), include=(0.0,), scale=2**-30),
)


def memory_of_ranks(run_dir: Path) -> Panel:
    """A strip with one line per rank; it has no curve if ranks.jsonl is missing or names a single rank."""
    table = [
        (line["step"], np.array(line["memory_bytes"]["allocated"], dtype=np.float32) / 2**30)
        for _, line in intact_lines(run_dir / RANKS_FILE)
        if "memory_bytes" in line
    ]
    ranks = len(table[-1][1]) if table else 0
    table = [(step, values) for step, values in table if len(values) == ranks]  # a resumed run may have another count
    curves = []
    if ranks > 1:
        steps = np.array([step for step, _ in table], dtype=np.float64)
        values = np.stack([values for _, values in table])  # [steps, ranks]
        fullest = sorted(np.argsort(-values[-1], kind="stable")[:MOST_RANKS].tolist())
        curves = [
            Curve("", f"rank {rank}", "average", colour, steps, values[:, rank])
            for colour, rank in enumerate(fullest, start=1)
        ]
    return strip("GiB held after the step", *curves, include=(0.0,))
