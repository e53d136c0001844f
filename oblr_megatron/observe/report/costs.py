"""Figures of what a step costs: time by phase and rank, use of the devices, memory."""

from __future__ import annotations

from oblr_megatron.observe.report.chart import Rule
from oblr_megatron.observe.report.specs import CurveSpec, FigureSpec, PanelSpec
from oblr_megatron.timing import PHASES

TIME = FigureSpec(
    "Time by phase",
    "Seconds of each step by phase on rank 0, stacked; the legend gives averages. Evaluation is left out here. The "
    "strip shows which rank took longest by itself in sampling and in the gradient, in the phase's colour.",
    "A phase that grows while response length does not: memory pressure, a slow disk, a waiting rank. Marks that rest "
    "on one rank.",
)

MARKED = ("rollout", "gradient")  # a strip of more of them would hide one behind another
RANKED = ("rollout", "gradnorm", "gradient")  # the phases that take long

RANKS = FigureSpec(
    "Slow ranks",
    "Longest and, in the same colour, shortest time that a rank took by itself in a phase, waiting for others left out "
    "where it is known. The strips show how much longer than the median rank the slowest one took over its part of the "
    "training, and which one that was.",
    "A ratio that stays above 1.2 at the same rank: all others wait for it in every step.",
    (
        PanelSpec(
            "s",
            tuple(
                curve
                for phase in RANKED
                for curve in (
                    CurveSpec(f"perf/ranks/{phase}/max_s", phase, "average", 1 + PHASES.index(phase)),
                    CurveSpec(f"perf/ranks/{phase}/min_s", f"{phase}, least", "average", 1 + PHASES.index(phase)),
                )
            ),
            include=(0.0,),
        ),
        PanelSpec(
            "",
            (CurveSpec("perf/slowest_rank_ratio", "slowest over median", "average", 2),),
            include=(1.0,),
            rules=(Rule(1.2, "slow", forced=True),),
            short=True,
        ),
        PanelSpec("rank", (CurveSpec("perf/slowest_rank", "slowest rank", "dots", 2),), include=(0.0, 1.0), short=True),
    ),
)

UTILIZATION = FigureSpec(
    "Use of the devices",
    "Model FLOPs of the samples trained on, over what the devices could have done in the time of norms, gradient and "
    "optimizer; and with a pass of their own for the norms counted as needed. The strip shows prompt and response "
    "tokens a second and rank over the whole step.",
    "Utilization that sinks at constant length: microbatches too small, ranks that wait, memory that is full.",
    (
        PanelSpec(
            "MFU",
            (
                CurveSpec("perf/mfu/actor", "training", "average"),
                CurveSpec("perf/mfu/with_norms", "with norms", "average", 3),
            ),
            include=(0.0,),
        ),
        PanelSpec("tokens/s", (CurveSpec("perf/throughput", "per rank", "average", 2),), include=(0.0,), short=True),
    ),
)

THROUGHPUT = FigureSpec(
    "Throughput and memory",
    "Response tokens and responses per second over the whole step without evaluation; peak memory of the trainer "
    "process that took most. The last strip shows what each rank held after the step; of many ranks, the fullest ones.",
    "Throughput that sinks at constant response length, or memory that climbs without end.",
    (
        PanelSpec("tokens/s", (CurveSpec("perf/tokens_per_s", "tokens per second"),), include=(0.0,)),
        PanelSpec(
            "samples/s",
            (CurveSpec("perf/samples_per_s", "responses per second", colour=2),),
            include=(0.0,),
            short=True,
        ),
        PanelSpec(
            "GiB",
            (CurveSpec("perf/peak_memory_bytes", "peak memory", "line", 3),),
            include=(0.0,),
            short=True,
            scale=2**-30,
        ),
    ),
)
