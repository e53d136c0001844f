"""Charts of what a step costs: time by phase and rank, device utilization, memory."""

from __future__ import annotations

from oblr_megatron.observe.report.chart import Rule
from oblr_megatron.observe.report.specs import CurveSpec, chart, panel, strip
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

RANKS = chart(
    "Slow ranks",
    "Longest and, in the same colour, shortest time of any rank in a phase, without waiting where that is measured. "
    "The strips show the slowest rank's own training time over the median rank's, and which rank is slowest.",
    "A ratio that stays above 1.2 at the same rank: all other ranks wait for it in every step.",
    panel(
        "s",
        *(
            CurveSpec(f"perf/ranks/{phase}/{end}_s", label, "average", 1 + PHASES.index(phase))
            for phase in RANKED
            for end, label in (("max", phase), ("min", f"{phase}, least"))
        ),
        include=(0.0,),
    ),
    strip(
        "",
        CurveSpec("perf/slowest_rank_ratio", "slowest over median", "average", 2),
        include=(1.0,),
        rules=(Rule(1.2, "slow", forced=True),),
    ),
    strip("rank", CurveSpec("perf/slowest_rank", "slowest rank", "dots", 2), include=(0.0, 1.0)),
)

UTILIZATION = chart(
    "Device utilization",
    "Model FLOPs of the samples trained on, divided by the devices' peak over the gradnorm, gradient and optimizer "
    "phases. The second curve counts a separate norms pass as useful work. The strip shows prompt and response tokens "
    "per second and rank over the whole step.",
    "Utilization that falls at constant length: microbatches too small, ranks that wait, or memory that is full.",
    panel(
        "MFU",
        CurveSpec("perf/mfu/actor", "training", "average"),
        CurveSpec("perf/mfu/with_norms", "with norms", "average", 3),
        include=(0.0,),
    ),
    strip("tokens/s", CurveSpec("perf/throughput", "per rank", "average", 2), include=(0.0,)),
)

THROUGHPUT = chart(
    "Throughput and memory",
    "Response tokens and responses per second over the step without evaluation, and the largest peak memory of any "
    "trainer process. The last strip shows the memory each rank held after the step, for at most eight ranks.",
    "Throughput that falls at constant response length, or memory that keeps growing.",
    panel("tokens/s", CurveSpec("perf/tokens_per_s", "tokens per second"), include=(0.0,)),
    strip("samples/s", CurveSpec("perf/samples_per_s", "responses per second", colour=2), include=(0.0,)),
    strip("GiB", CurveSpec("perf/peak_memory_bytes", "peak memory", "line", 3), include=(0.0,), scale=2**-30),
)
