"""The files of a study of curves: summary.md, summary.json, runs.csv and the plots."""

from __future__ import annotations

import json
from pathlib import Path

from oblr_megatron.metrics import write_whole
from studies.curve_plots import write_figures
from studies.plan import Plan
from studies.summary import as_json, summarise, write_runs
from studies.tables import document


def write_summary(plan: Plan, out: Path) -> list[Path]:
    """All files; their paths, summary.md first.

    Raises:
        UserError: there is no whole run.
    """

    tasks = summarise(plan, out)
    write_whole(out / "summary.json", json.dumps(as_json(plan, tasks), indent=1, allow_nan=False) + "\n")
    write_runs(tasks, out / "runs.csv")
    figures = write_figures(tasks, out)
    write_whole(out / "summary.md", document(plan, tasks))
    return [out / "summary.md", out / "summary.json", out / "runs.csv", *figures]
