"""The measurements of a quantised model, as DST/quantize.json and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from oblr_megatron.extras.quantize.accuracy import Accuracy
from oblr_megatron.extras.quantize.fidelity import LogitError
from oblr_megatron.formatting import number, size

REPORT = "quantize.json"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The calibration data.

    Example: Calibrated(file="gsm8k_train.jsonl", rows=512, tokens=51200, skipped_rows=3, held_out_rows=32)
    """

    file: str
    rows: int
    tokens: int
    skipped_rows: int
    held_out_rows: int


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """All measurements of one quantised directory; the fields are the keys of quantize.json."""

    source: str
    format: str
    modelopt: str  # version
    device: str  # used for calibration and measurement
    calibration: Calibrated
    logits: LogitError  # simulated FP8 against the original, on the held-out rows
    quantized_weights: int  # tensors; each was read back and equals the measured one
    weight_bytes_before: int
    weight_bytes_after: int
    accuracy_engine: str | None = None  # engine that answered; None: no sets were given
    accuracy_before: dict[str, Accuracy] = field(default_factory=dict)  # by set
    accuracy_after: dict[str, Accuracy] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write quantize.json."""
        (directory / REPORT).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The measurements as a table for the console."""
        used, error = self.calibration, self.logits
        scale = f"of an rms of {number(error.original_rms)}"
        rows = [
            ("calibrated on", f"{used.rows:,} rows, {used.tokens:,} tokens; skipped: {used.skipped_rows:,}"),
            ("logit error", f"mean {number(error.mean_abs)}, max {number(error.max_abs)}, {scale}"),
            ("next token", f"KL {number(error.kl)} nats, same most likely token {error.top1_agreement:.2%}"),
            ("measured on", f"{used.held_out_rows:,} held-out rows, {error.tokens:,} tokens, FP8 simulated"),
            ("weights", f"{size(self.weight_bytes_before)} -> {size(self.weight_bytes_after)}"),
        ]
        for name, before in self.accuracy_before.items():
            after = self.accuracy_after[name]
            rows.append((f"{name}, {before.prompts:,} prompts", f"{_interval(before)} -> {_interval(after)}"))
        if self.accuracy_engine is not None:
            rows.append(("answered by", self.accuracy_engine))
        table = Table(title=f"{self.source} in {self.format}", title_justify="left", show_header=False)
        table.add_column(style="dim")
        table.add_column()
        for row in rows:
            table.add_row(*row)
        return table


def _interval(accuracy: Accuracy) -> str:
    unscored = f", {accuracy.unscored:,} unscored" if accuracy.unscored else ""
    return f"{accuracy.accuracy:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%}{unscored})"
