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

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS_FILE, read_metrics

WHERE = "control_from"


def control_rates(control: str, source: Path, *, num_steps: int, seed: int, warmup_steps: int) -> list[float]:
    """[num_steps] the learning rates of a run that controls another one.

    Args:
        control: "shuffled" or "matched_decay".
        source: directory of the run that supplies the rates; its first num_steps rates are used.
        num_steps: length of the run.
        seed: the run's seed, for "shuffled".
        warmup_steps: the first steps, if the source has no config.json; "matched_decay" keeps their rates.

    Raises:
        UserError: see `source_rates`.
    """
    rates = source_rates(source, num_steps)
    if control == "shuffled":
        return shuffled(rates, seed)
    return matched_decay(rates, min(_warmup_of(source, warmup_steps), num_steps))


def source_rates(source: Path, num_steps: int) -> list[float]:
    """[num_steps] the logged learning rates of the first steps of a run.

    Raises:
        UserError: the run logged fewer than num_steps rates, or one that is not positive.
    """
    logged = [record["lr"] for record in read_metrics(source) if "lr" in record]
    file = str(source / METRICS_FILE)
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


def _warmup_of(run_dir: Path, otherwise: int) -> int:
    """Number of first steps with rates independent of the gradients, from the source's config.json."""
    path = run_dir / "config.json"
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        collecting = int(source["algo"]["snr"]["warmup_steps"]) if source["algo"]["schedule"] == "snr" else 0
        return max(collecting, int(source.get("optimizer", {}).get("lr_warmup_steps", 0)))
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"algo.schedule and algo.snr.warmup_steps cannot be read: {error}",
            where=f"{WHERE}: {path}",
            fix="restore the file, or remove it to use this run's algo.snr.warmup_steps",
        ) from error
