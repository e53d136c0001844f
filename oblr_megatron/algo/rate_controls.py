"""Control schedules for the snr schedule: the learning rates of an earlier run, shuffled or smoothed.

Decaying the rate helps on its own. To show that *when* it decays matters, a schedule must beat its own rates in
shuffled order ("shuffled") and a smooth decay with the same mean ("matched_decay").
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS_FILE, read_metrics

CONTROLS = ("shuffled", "matched_decay")
WHERE = "algo.schedule_from"


def control_rates(algo: AlgoConfig, *, num_steps: int, seed: int) -> list[float]:
    """[num_steps] the learning rates of a run under one of the CONTROLS.

    Args:
        algo: schedule and schedule_from are read; also snr.warmup_steps if the source has no config.json.
        num_steps: length of the run; only the source's first num_steps rates are used.
        seed: the run's seed, for "shuffled".

    Raises:
        UserError: see `source_rates`.
    """
    rates = source_rates(algo, num_steps)
    if algo.schedule == "shuffled":
        return shuffled(rates, seed)
    assert algo.schedule_from is not None, "checked by source_rates"
    return matched_decay(rates, min(_warmup_of(algo.schedule_from, algo), num_steps))


def source_rates(algo: AlgoConfig, num_steps: int) -> list[float]:
    """[num_steps] the logged learning rates of the first steps of the run `algo.schedule_from`.

    Raises:
        UserError: schedule_from is not set; or its run logged fewer than num_steps rates, or one that is not positive.
    """
    if algo.schedule_from is None:
        raise UserError(
            f"schedule {algo.schedule!r} needs the learning rates of an earlier run, but schedule_from is not set",
            where=WHERE,
            fix="set it to the run_dir of a run with at least num_steps steps",
        )
    logged = [record["lr"] for record in read_metrics(algo.schedule_from) if "lr" in record]
    file = str(algo.schedule_from / METRICS_FILE)
    if len(logged) < num_steps:
        raise UserError(
            f"only {len(logged)} learning rates are logged, fewer than num_steps {num_steps}",
            where=f"{WHERE}: {file}",
            fix="name a longer run, or lower num_steps",
        )
    rates = [rate for rate in logged[:num_steps] if rate is not None and rate > 0]
    if len(rates) < num_steps:
        raise UserError(
            f"{num_steps - len(rates)} of the first {num_steps} learning rates are not positive numbers",
            where=f"{WHERE}: {file}",
            fix="name a run with positive learning rates",
        )
    return rates


def check_source(algo: AlgoConfig, num_steps: int) -> None:
    """Refuse a control schedule without a valid source, and a source without a control schedule.

    Raises:
        UserError: see `source_rates`; or schedule_from is set with another schedule.
    """
    if algo.schedule in CONTROLS:
        source_rates(algo, num_steps)
    elif algo.schedule_from is not None:
        raise UserError(
            f"schedule_from is set, but schedule {algo.schedule!r} does not use it",
            where=WHERE,
            fix=f"remove it, or set algo.schedule to one of {', '.join(CONTROLS)}",
        )


def shuffled(rates: Sequence[float], seed: int) -> list[float]:
    """The same rates in random order, including those of the warm-up."""
    return random.Random(seed).sample(rates, len(rates))


def matched_decay(rates: Sequence[float], warmup_steps: int) -> list[float]:
    """The source's warm-up, then the least-squares line through log rate, scaled to the source's mean over all steps.

    Args:
        rates: [n] of the source, positive.
        warmup_steps: of the source; these rates are kept.

    Example: without warm-up, rates 1, 1/2, 1/4 lie on such a line and are returned unchanged.
    """
    warmup, rest = list(rates[:warmup_steps]), rates[warmup_steps:]
    if not rest:
        return warmup
    slope = _slope([math.log(rate) for rate in rest])
    line = [math.exp(slope * step) for step in range(len(rest))]  # up to a factor that the mean determines
    factor = sum(rest) / sum(line)
    return warmup + [factor * value for value in line]


def _slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through values at 0, 1, 2, ...; 0 for a single value."""
    centre = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((step - centre) ** 2 for step in range(len(values)))
    rise = sum((step - centre) * (value - mean) for step, value in enumerate(values))
    return rise / spread if spread else 0.0


def _warmup_of(run_dir: Path, algo: AlgoConfig) -> int:
    """Number of first steps with rates independent of the gradients, from the source's config.json, else this run's."""
    path = run_dir / "config.json"
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        collecting = int(source["algo"]["snr"]["warmup_steps"]) if source["algo"]["schedule"] == "snr" else 0
        return max(collecting, int(source.get("optimizer", {}).get("lr_warmup_steps", 0)))
    except FileNotFoundError:
        return algo.snr.warmup_steps
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"algo.schedule and algo.snr.warmup_steps cannot be read: {error}",
            where=f"{WHERE}: {path}",
            fix="restore the file, or remove it to use this run's algo.snr.warmup_steps",
        ) from error
