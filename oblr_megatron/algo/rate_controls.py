"""The controls of the snr schedule: rates of an earlier run, out of order or smoothed.

A rate that falls does good by itself: any schedule that claims to know when must beat the same rates at other times
("shuffled") and a plain decay that spends as much ("matched_decay").
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
    """[num_steps] the rates of a run under one of the CONTROLS.

    Args:
        algo: schedule and schedule_from are read; snr.warmup_steps where the source does not say what its own were.
        num_steps: of the run; of the source, as many of its first steps count.
        seed: of the run, for "shuffled".

    Raises:
        UserError: see `source_rates`.
    """
    rates = source_rates(algo, num_steps)
    if algo.schedule == "shuffled":
        return shuffled(rates, seed)
    assert algo.schedule_from is not None, "source_rates has seen to it"
    return matched_decay(rates, min(_warmup_of(algo.schedule_from, algo), num_steps))


def source_rates(algo: AlgoConfig, num_steps: int) -> list[float]:
    """[num_steps] the rates that the run `algo.schedule_from` took its first steps with.

    Raises:
        UserError: no run is named, or what is named has logged no rates, or fewer than num_steps, or one that is no
            positive number.
    """
    if algo.schedule_from is None:
        raise UserError(
            f"schedule {algo.schedule!r} takes its rates from an earlier run, and none is named",
            where=WHERE,
            fix="name the run_dir of a run with as many steps",
        )
    logged = [record["lr"] for record in read_metrics(algo.schedule_from) if "lr" in record]
    file = str(algo.schedule_from / METRICS_FILE)
    if len(logged) < num_steps:
        raise UserError(
            f"{len(logged)} learning rates are logged, and the run has num_steps {num_steps}",
            where=f"{WHERE}: {file}",
            fix="name a run of as many steps, or lower num_steps",
        )
    rates = [rate for rate in logged[:num_steps] if rate is not None and rate > 0]
    if len(rates) < num_steps:
        raise UserError(
            f"{num_steps - len(rates)} of the first {num_steps} learning rates are not positive numbers",
            where=f"{WHERE}: {file}",
            fix="name a run whose rates are all positive",
        )
    return rates


def check_source(algo: AlgoConfig, num_steps: int) -> None:
    """Refuse a control without a source that will do, and a source without a control.

    Raises:
        UserError: see `source_rates`; or schedule_from is set under another schedule.
    """
    if algo.schedule in CONTROLS:
        source_rates(algo, num_steps)
    elif algo.schedule_from is not None:
        raise UserError(
            f"schedule_from is set, and schedule {algo.schedule!r} takes nothing from it",
            where=WHERE,
            fix=f"remove it, or set algo.schedule to one of {', '.join(CONTROLS)}",
        )


def shuffled(rates: Sequence[float], seed: int) -> list[float]:
    """The same rates in an order drawn from the seed, those of the warm-up among them."""
    return random.Random(seed).sample(rates, len(rates))


def matched_decay(rates: Sequence[float], warmup_steps: int) -> list[float]:
    """The source's warm-up, then the line that fits log rate best, scaled to the source's mean over all steps.

    Args:
        rates: [n] of the source, positive.
        warmup_steps: of the source; its rates are taken as they are.

    Example: without warm-up, rates 1, 1/2, 1/4 lie on such a line and come back as they are.
    """
    warmup, rest = list(rates[:warmup_steps]), rates[warmup_steps:]
    if not rest:
        return warmup
    slope = _slope([math.log(rate) for rate in rest])
    line = [math.exp(slope * step) for step in range(len(rest))]  # up to a factor, which the mean decides
    factor = sum(rest) / sum(line)
    return warmup + [factor * value for value in line]


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line through values at 0, 1, 2, ...; 0 for a single one."""
    centre = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((step - centre) ** 2 for step in range(len(values)))
    rise = sum((step - centre) * (value - mean) for step, value in enumerate(values))
    return rise / spread if spread else 0.0


def _warmup_of(run_dir: Path, algo: AlgoConfig) -> int:
    """First steps of the source whose rates were no function of its gradients, by its config.json; or this run's."""
    path = run_dir / "config.json"
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        collecting = int(source["algo"]["snr"]["warmup_steps"]) if source["algo"]["schedule"] == "snr" else 0
        return max(collecting, int(source.get("optimizer", {}).get("lr_warmup_steps", 0)))
    except FileNotFoundError:
        return algo.snr.warmup_steps
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"its algo.schedule and algo.snr.warmup_steps cannot be read: {error}",
            where=f"{WHERE}: {path}",
            fix="restore the file, or remove it: algo.snr.warmup_steps of this run is taken then",
        ) from error
