"""What should not go unnoticed in a run: each alarm is one line with its figure and a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from oblr_megatron.formatting import number
from oblr_megatron.report.history import History

# A step of equal lengths or equal rewards leaves these without a value, and nothing is wrong.
MAY_BE_UNDEFINED = frozenset({"gradnorm/length_corr", "gradnorm/estimate_corr", "baseline/variance_ratio_vs_rloo"})


def alarms(history: History) -> list[str]:
    """All alarms of a run, in order of weight; empty for a run that looks sound."""
    return [text for text in (check(history) for check in CHECKS) if text]


def _ends(history: History, name: str) -> tuple[float, float] | None:
    """Medians of the first and the last tenth of a metric; None below 20 values, where they would say nothing."""
    values = history.points(name)[1]
    if len(values) < 20:
        return None
    tenth = len(values) // 10
    return float(np.median(values[:tenth])), float(np.median(values[-tenth:]))


def _counted(count: int, noun: str) -> str:
    """2, "response" -> "2 responses were"."""
    return f"{count:,} {noun} was" if count == 1 else f"{count:,} {noun}s were"


def _nonfinite(history: History) -> str:
    counts = Counter(name for record in history.records for name, value in record.items() if value is None)
    names = [f"{name} x{count:,}" for name, count in counts.most_common() if name not in MAY_BE_UNDEFINED]
    return f"Not finite: {', '.join(names)}; find them as null in metrics.jsonl." if names else ""


def _mismatch(history: History) -> str:
    ends = _ends(history, "rollout/logprob_abs_diff")
    if ends is None or (ends[1] < 0.1 and not (ends[1] > 1e-3 and ends[1] > 10 * ends[0])):
        return ""
    return (
        f"Trainer and vLLM differ by {number(ends[1], 2)} nats a token at the end, {number(ends[0], 2)} at the start; "
        "check dtypes and the weight push."
    )


def _gradnorm(history: History) -> str:
    count = int(history.total("gradnorm/nonfinite"))
    return (
        f"{_counted(count, 'response gradient')} found without a finite norm; lower the rate or raise the precision."
        if count
        else ""
    )


def _failures(history: History) -> str:
    count = int(history.total("reward/failures"))
    return (
        f"{_counted(count, 'response')} not judged, and scored 0; raise reward.timeout_s or look at the verifier."
        if count
        else ""
    )


def _reward(history: History) -> str:
    ends = _ends(history, "reward/mean")
    if ends is None or ends[1] >= ends[0] - 0.02:
        return ""
    return f"The reward fell from {number(ends[0], 2)} to {number(ends[1], 2)}; lower optimizer.lr."


def _shrink(history: History) -> str:
    values, floor = history.points("snr/shrink_ema")[1], history.setting("algo.snr.floor")
    if len(values) < 20 or not isinstance(floor, float) or history.setting("algo.schedule") != "snr":
        return ""
    resting = float(np.mean(values[-len(values) // 3 :] <= floor * 1.001))
    if resting < 0.5:
        return ""
    return f"The shrink factor rested on its floor in {resting:.0%} of the last third of the steps; raise num_prompts."


def _entropy(history: History) -> str:
    ends = _ends(history, "entropy")
    if ends is None or ends[1] > 0.03 * ends[0]:
        return ""
    return f"Entropy fell from {number(ends[0], 2)} to {number(ends[1], 2)} nats: the policy hardly explores any more."


def _truncated(history: History) -> str:
    ends = _ends(history, "response_length/truncated_fraction")
    if ends is None or ends[1] < 0.2 or ends[1] < ends[0] + 0.05:
        return ""
    return f"Truncated responses rose from {ends[0]:.0%} to {ends[1]:.0%}; raise rollout.max_response_tokens."


def _mixed(history: History) -> str:
    ends = _ends(history, "groups/mixed_fraction")
    if ends is None or ends[1] >= 0.05:
        return ""
    return f"Only {ends[1]:.0%} of the prompts still have unequal rewards; the data are solved, or too hard."


CHECKS: tuple[Callable[[History], str], ...] = (
    _nonfinite,
    _mismatch,
    _gradnorm,
    _failures,
    _reward,
    _shrink,
    _entropy,
    _truncated,
    _mixed,
)
