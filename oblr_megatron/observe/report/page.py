"""Writes the report's page: header, headline numbers, alarms, charts, the last step and the config."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from oblr_megatron.formatting import MISSING, duration, fixed, flatten, quantity
from oblr_megatron.metrics import Metric, describe, write_whole
from oblr_megatron.observe.alarm_window import planned
from oblr_megatron.observe.alarms import alarms_of
from oblr_megatron.observe.prompt_log import VISITS, never_solved
from oblr_megatron.observe.report.axes import step_axis
from oblr_megatron.observe.report.history import Array, RunHistory, load_history
from oblr_megatron.observe.report.sections import draw_chart, sections

HERE = Path(__file__).parent
REPORT_FILE = "report.html"
LISTED = 50  # prompts that were never solved


def write_report(run_dir: str | Path) -> Path:
    """Write RUN_DIR/report.html, one file without outside resources, and return its path.

    The run may be finished, running or interrupted.

    Raises:
        UserError: the run has logged no step, or its files cannot be read.
    """
    path = Path(run_dir) / REPORT_FILE
    write_whole(path, render(load_history(Path(run_dir))))  # a browser that reloads sees the old or the new report
    return path


def render(history: RunHistory) -> str:
    """The report as HTML."""
    page, style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    charts, missing = _charts(history)
    return Template(page).substitute(
        style=style,
        script=script,
        title=escape(history.directory.name),
        subtitle=escape(" · ".join(_subtitle(history))),
        headlines=_headlines(history),
        alarms=_alarms(history),
        unsolved=_unsolved(history),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(history)),
        charts=charts,
        missing=missing,
        last_step=f"{history.last_step:,}",
        metrics=_metrics_rows(history),
        config=_config_tables(history.config),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _subtitle(history: RunHistory) -> Iterable[str]:
    """Model, baseline, schedule and seed, as far as the config records them."""
    model = history.setting("model.path")
    yield Path(model).name if model else "model not recorded"
    if baseline := history.setting("algo.baseline"):
        yield f"{baseline} baseline"
    if schedule := history.setting("algo.schedule"):
        yield f"{schedule} schedule"
    if (seed := history.setting("seed")) is not None:
        yield f"seed {seed}"


def _headlines(history: RunHistory) -> str:
    """Tiles with accuracy before and after, reward, steps and time."""
    tiles = []
    for name in history.evaluation_sets():
        for metric, label in (("accuracy", "greedy accuracy"), ("mean_at_k", "sampled accuracy")):
            values = history.points(f"eval/{name}/{metric}")[1]
            gain = f"{100 * (values[-1] - values[0]):+.1f} points" if len(values) > 1 else "evaluated once"
            if len(values):
                tiles.append(_tile(f"{name}: {label}", _change(values), gain))
    rewards = history.points("reward/mean")[1]
    if len(rewards) >= 20:
        tenth = len(rewards) // 10
        ends = np.array([rewards[:tenth].mean(), rewards[-tenth:].mean()])
        tiles.append(_tile("training reward", _change(ends), "first and last tenth"))
    elif len(rewards):
        tiles.append(_tile("training reward", _change(rewards), "first and last step"))
    planned = history.setting("num_steps")
    state = "finished" if history.last_step == planned else "so far"
    tiles.append(_tile("steps", f"{history.last_step:,}", f"of {planned:,}, {state}" if planned else state))
    seconds = history.points("timing_s/step")[1]
    per_step = f"{duration(float(np.median(seconds)))} per step (median)" if len(seconds) else ""
    tiles.append(_tile("time", duration(float(seconds.sum())) if len(seconds) else MISSING, per_step))
    return "".join(tiles)


def _tile(label: str, value: str, note: str) -> str:
    """One tile; `value` is already HTML."""
    return f'<div class="tile"><span>{escape(label)}</span><strong>{value}</strong><small>{escape(note)}</small></div>'


def _change(values: Array) -> str:
    """First and last value as HTML, or the only one."""
    if len(values) == 1:
        return fixed(values[0], 2)
    return f'<em>{fixed(values[0], 2)}</em><span class="arrow">→</span>{fixed(values[-1], 2)}'


def _alarms(history: RunHistory) -> str:
    """The run's alarms as HTML, with the step at which each was first raised."""
    alarms = alarms_of(history.directory, planned(history.setting), history.records)
    if not alarms:
        return '<p class="sound">No alarm: the automatic checks found no problem.</p>'
    lines = (f'<li>{escape(one.text)} <span class="since">first at step {one.step:,}</span></li>' for one in alarms)
    return f'<ul class="alarms">{"".join(lines)}</ul>'


def _unsolved(history: RunHistory) -> str:
    """The prompts that were never solved as a section; "" if there are none."""
    visits = never_solved(history.directory, history.last_step)
    if not visits:
        return ""
    shown = islice(visits.items(), LISTED)
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{count}</td></tr>" for name, count in shown)
    more = f", the first {LISTED} of them" if len(visits) > LISTED else ""
    return (
        f"<section><h2>Prompts never solved</h2><p>{len(visits):,} prompts came {VISITS} times or more without success"
        f"{more}: look for wrong answers in the data.</p>"
        f"<table><thead><tr><th>source/id</th><td>visits</td></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _facts(history: RunHistory) -> Iterable[tuple[str, str]]:
    """(name, text) of each recorded fact: model, layout, batch, optimizer, data, device, versions."""
    setting, environment = history.setting, history.environment
    if setting("model.path"):
        yield "model", f"{setting('model.path')} ({setting('model.dtype')})"
    if setting("parallel"):
        yield "layout", _layout(history)
    if setting("num_prompts"):
        yield "batch", f"{setting('num_prompts')} prompts x {setting('group_size')} responses"
    if options := setting("rollout"):
        tokens = options.get("max_response_tokens")
        yield "sampling", f"temperature {options.get('temperature')}, at most {tokens} tokens"
    if options := setting("optimizer"):
        yield "optimizer", f"{options.get('name')}, lr {options.get('lr')}, clip {options.get('clip_grad')}"
    if setting("data.train"):
        yield "data", ", ".join(source["path"] for source in setting("data.train"))
    if environment.get("started"):
        yield "started", str(environment["started"]).replace("T", " ").replace("+00:00", " UTC")
    if environment.get("device"):
        yield "device", str(environment["device"])
    if versions := environment.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _layout(history: RunHistory) -> str:
    """Example: "TP 2 x PP 1 x DP 2, 4 ranks". The data-parallel size needs the recorded number of ranks."""
    tensor = history.setting("parallel.tensor_model_parallel_size", 1)
    pipeline = history.setting("parallel.pipeline_model_parallel_size", 1)
    context = history.setting("parallel.context_parallel_size", 1)
    sequence = ", sequence parallel" if history.setting("parallel.sequence_parallel") else ""
    ranks = history.environment.get("world_size")
    replicas = (
        f" x DP {ranks // (tensor * pipeline * context)}, {ranks} rank{'s' if ranks > 1 else ''}" if ranks else ""
    )
    return f"TP {tensor} x PP {pipeline}{f' x CP {context}' if context > 1 else ''}{replicas}{sequence}"


def _charts(history: RunHistory) -> tuple[str, str]:
    """All sections as HTML, and a paragraph that names the charts without logged metrics."""
    horizontal = step_axis(history.last_step)
    html, missing = "", []
    for title, charts in sections(history).items():
        figures = ""
        for chart in charts:
            plot = draw_chart(chart, history, horizontal)
            if plot:
                figures += (
                    f"<figure><h3>{escape(chart.title)}</h3>{plot}<figcaption>{escape(chart.caption)} "
                    f'<span class="alarming"><b>Alarming:</b> {escape(chart.alarming)}</span></figcaption></figure>'
                )
            elif not chart.optional:
                missing.append(chart.title)
        if figures:
            html += f'<section><h2>{escape(title)}</h2><div class="charts">{figures}</div></section>'
    names = escape(", ".join(missing))
    return html, f'<p class="missing">Not logged in this run: {names}.</p>' if missing else ""


def _metrics_rows(history: RunHistory) -> str:
    """The last record, one row per metric."""
    rows = ""
    for name, value in history.records[-1].items():
        metric = Metric(name, "", "")  # logged by another version
        with suppress(KeyError):
            metric = describe(name)
        unit = "" if metric.unit in ("s", "bytes") else metric.unit
        rows += (
            f"<tr><th>{escape(name)}</th><td>{quantity(value, metric.unit)}</td>"
            f"<td>{escape(unit)}</td><td>{escape(metric.meaning)}</td></tr>"
        )
    return rows


def _config_tables(config: dict[str, Any]) -> str:
    """The resolved config, one table per section, top-level values first."""
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    named = [("run", top)] + [(key, flatten(value)) for key, value in config.items() if isinstance(value, dict)]
    return "".join(
        f"<table><caption>{escape(name)}</caption><tbody>"
        + "".join(f"<tr><th>{escape(key)}</th><td>{escape(_text(value))}</td></tr>" for key, value in table.items())
        + "</tbody></table>"
        for name, table in named
        if table
    )


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else str(value)
