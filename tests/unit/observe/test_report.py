"""The report: what it holds, that it stands alone, and that no course of a run breaks it.

The runs are synthetic (synthetic_run.py). Not covered: how the page looks, which a person has to judge in a browser,
and the pointer's read-out, which needs one.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS
from oblr_megatron.observe.report import write_report
from oblr_megatron.observe.report.axes import linear_axis, log_axis, step_axis
from oblr_megatron.observe.report.costs import RANKED
from oblr_megatron.observe.report.history import History, load_history, smooth, thin_line, thin_points
from oblr_megatron.observe.report.panel import batch_advice
from oblr_megatron.observe.report.ranks import memory_of_ranks
from oblr_megatron.observe.report.sections import sections
from oblr_megatron.timing import PHASES
from tests.unit.synthetic_run import CONFIG, RATIOS, synthetic_records, write_run

VOID = {"meta", "br", "hr", "img", "link", "input"}
NAMES = [
    metric.name.replace("<set>", "sums").replace("<term>", "overlong").replace("<name>", name).replace("<phase>", phase)
    for metric in METRICS
    for name in (RATIOS if "<name>" in metric.name else ("",))
    for phase in (PHASES[:6] if "<phase>" in metric.name else ("",))
]
OUTSIDE = ("src", "href", "xlink:href", "action", "srcset", "data", "poster")


class Page(HTMLParser):
    """Checks that tags close in order; collects texts and attributes by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data


def report_of(run_dir: Path) -> tuple[str, Page]:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"\bnan\b|NaN|Infinity|\binf\b|None", re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    )
    return text, Page(text)


def report_from(tmp_path: Path, records: list[dict], **files) -> tuple[str, Page]:
    return report_of(write_run(tmp_path / "run", records, **files))


def test_every_figure_and_every_metric_is_there(tmp_path):
    text, page = report_from(tmp_path, synthetic_records(150))
    history = load_history(tmp_path / "run")
    titles = [figure.title for section in sections(history) for figure in section.metrics]
    assert page.texts["h3"] == titles
    assert len(titles) == 19
    assert "Held-out accuracy: sums" in titles
    assert text.count("<b>Alarming:</b>") == len(titles)
    assert "Not logged in this run" not in text
    assert set(NAMES) <= set(page.texts["th"])


def test_every_metric_is_drawn_or_counted_by_an_alarm(tmp_path):
    history = load_history(write_run(tmp_path, synthetic_records(30)))
    metrics = [figure for section in sections(history) for figure in section.metrics]
    drawn = {curve.metric for figure in metrics for panel in figure.panels for curve in panel.curves}
    elsewhere = {
        "step",
        "reward/std",
        "reward/failures",
        "reward/timeouts",
        "rewards/overlong/mean",
        "rewards/overlong/std",
        "gradnorm/nonfinite",
        "baseline/self_dependence",
        "weights/version",
        "data/epoch",
        "data/skipped",
        "perf/peak_memory_rank",
        *(name for name in NAMES if name.startswith("perf/ranks/") and name.split("/")[2] not in RANKED),
        *(f"perf/ranks/{phase}/slowest" for phase in RANKED),
    }
    names = {name for name in NAMES if not name.startswith("timing_s/")}
    assert drawn | elsewhere == names
    assert not drawn & elsewhere


def test_the_page_needs_nothing_from_outside(tmp_path):
    text, page = report_from(tmp_path, synthetic_records(40))
    assert "http" not in text.lower()
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in page.attributes:
        assert not set(attributes) & set(OUTSIDE), f"<{tag}> points outside"
        assert tag not in ("link", "iframe", "object", "embed", "img")


def test_header_and_headlines(tmp_path):
    text, page = report_from(tmp_path, synthetic_records(150))
    assert page.texts["h1"] == ["run"]
    assert "tiny-qwen3 · optimal_prior baseline · snr schedule · seed 0" in text
    for fact in ("TP 1 x PP 1 x DP 2, 2 ranks", "64 prompts x 8 responses", "torch 2.13.0", "2030-01-02 03:04:05 UTC"):
        assert fact in text
    records = synthetic_records(150)
    before, after = records[0]["eval/sums/accuracy"], records[-1]["eval/sums/accuracy"]
    assert f'<em>{before:.2f}</em><span class="arrow">→</span>{after:.2f}' in text
    assert f"{100 * (after - before):+.1f} points" in text
    assert "of 150, finished" in text
    assert "No alarm" in text


def test_text_of_the_run_is_escaped(tmp_path):
    records = [record | {"eval/<b>&/accuracy": 0.5} for record in synthetic_records(3)]
    config = CONFIG | {"model": {"path": "models/<script>alert(1)</script>", "dtype": "float32"}}
    text, _ = report_of(write_run(tmp_path / "a<b&c", records, config=config))
    assert "<script>alert" not in text
    assert "a&lt;b&amp;c" in text
    assert "eval/&lt;b&gt;&amp;/accuracy" in text
    assert "{question} &lt;&amp;&gt;" in text


def test_one_step(tmp_path):
    text, page = report_from(tmp_path, synthetic_records(1, evaluate_every=0), config=CONFIG | {"num_steps": 1})
    assert "of 1, finished" in text
    assert "Not logged in this run: Held-out accuracy." in text
    assert len(page.texts["h3"]) == 18


def test_only_an_evaluation_so_far(tmp_path):
    text, page = report_from(tmp_path, synthetic_records(1)[:1])
    assert page.texts["h3"] == ["Held-out accuracy: sums"]
    assert "evaluated once" in text
    assert "of 150, so far" in text


def test_a_run_in_progress_with_a_half_written_line(tmp_path):
    run = write_run(tmp_path, synthetic_records(150)[:74])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 74, "rew')
    text, _ = report_of(run)
    assert "of 150, so far" in text
    assert "<h2>Step 73</h2>" in text


def test_without_config_and_environment(tmp_path):
    text, _ = report_from(tmp_path, synthetic_records(30), config=None, environment=None)
    assert "model not recorded" in text


@pytest.mark.parametrize("missing", sorted({name.partition("/")[0] for name in synthetic_records(1)[1]} - {"step"}))
def test_a_family_of_metrics_may_be_missing(tmp_path, missing):
    records = [
        {name: value for name, value in record.items() if name.partition("/")[0] != missing}
        for record in synthetic_records(30)
    ]
    report_from(tmp_path, records)


def test_only_steps(tmp_path):
    text, page = report_from(tmp_path, [{"step": 1}, {"step": 2}])
    assert "h3" not in page.texts
    assert text.count("Not logged in this run") == 1


@pytest.mark.parametrize("value", [None, 0, 0.0, -1.0, 1e-300, 1e300])
def test_any_value_everywhere(tmp_path, value):
    records = [
        {name: step if name == "step" else value for name in record}
        for step, record in enumerate(synthetic_records(25))
    ]
    text, _ = report_from(tmp_path, records)
    assert ("Not finite: " in text) == (value is None)


def test_single_nulls_leave_gaps(tmp_path):
    records = synthetic_records(60)
    for record in records[1::7]:
        record["reward/mean"] = record["lr"] = record["timing_s/step"] = record["rollout/logprob_abs_diff"] = None
    text, _ = report_from(tmp_path, records)
    names = ("reward/mean", "rollout/logprob_abs_diff", "lr", "timing_s/step")
    assert f"Not finite: {', '.join(f'{name} x9' for name in names)}; find them" in text


def test_an_undefined_correlation_is_no_alarm(tmp_path):
    records = [record | {"gradnorm/length_corr": None} for record in synthetic_records(30)]
    text, _ = report_from(tmp_path, records)
    assert "No alarm" in text


def test_a_long_run_stays_a_small_file(tmp_path):
    text, _ = report_from(
        tmp_path, synthetic_records(10_000, evaluate_every=500), config=CONFIG | {"num_steps": 10_000}
    )
    assert len(text) < 1_000_000, len(text)
    assert all(len(path) < 25_000 for path in re.findall(r' d="([^"]*)"', text))


def test_the_fullest_ranks_are_drawn(tmp_path):
    """Of ten the eight that hold most, but for lines of another layout and the one that was being written."""
    run = write_run(tmp_path / "run", synthetic_records(3))
    held = [(step, [2**30 * (1 + rank % 9) for rank in range(10)]) for step in (1, 2, 3)]
    lines = [json.dumps({"step": step, "memory_bytes": {"allocated": values}}) for step, values in held]
    (run / "logs").mkdir()
    other = json.dumps({"step": 1, "memory_bytes": {"allocated": [1, 2]}})
    (run / "logs" / "ranks.jsonl").write_text("\n".join([other, *lines, '{"step": 4, "mem']))
    panel = memory_of_ranks(run)
    assert [curve.label for curve in panel.curves] == [f"rank {rank}" for rank in range(1, 9)]
    assert [float(curve.values[-1]) for curve in panel.curves] == list(range(2, 10))
    assert panel.curves[0].steps.tolist() == [1, 2, 3]
    assert "GiB held after the step" in report_of(run)[0]
    assert memory_of_ranks(tmp_path).curves == []


def test_the_pointers_data_match_the_legend(tmp_path):
    _, page = report_from(tmp_path, synthetic_records(90))
    plots = [attributes for tag, attributes in page.attributes if "data-curves" in attributes]
    assert len(plots) == 40
    for plot in plots:
        assert plot["data-last"] == "90"
        for curve in json.loads(plot["data-curves"]):
            assert len(curve["x"]) == len(curve["y"])
            assert curve["x"] == sorted(curve["x"])
            assert curve["x"][-1] <= 90


def test_alarms_are_listed_with_the_figures_of_now_and_the_step_they_began(tmp_path):
    """What goes off when is tests/unit/observe/test_alarms.py's matter."""
    records = synthetic_records(100, evaluate_every=0)
    for record in records:
        record["response_length/truncated_fraction"] = record["step"] / 100
        record["reward/failures"] = int(record["step"] < 4)
    text, _ = report_from(tmp_path, records)
    assert re.findall(r"<li>(.*?)</li>", text) == [
        "3 responses were not judged, and scored 0; raise reward.timeout_s or look at the verifier. "
        '<span class="since">first at step 1</span>',
        "Truncated responses rose from 11% to 90%; raise rollout.max_response_tokens. "
        '<span class="since">first at step 40</span>',
    ]


def test_the_order_of_baselines_and_the_advice_on_the_batch_size(tmp_path):
    text, _ = report_from(tmp_path, synthetic_records(150))
    order = re.search(r"Over the last third: (.*?)\.? <span", text)[1].rstrip(".").split(", ")
    assert order[0].startswith("optimal_prior 0.") and order[-1].startswith("none 4.")
    assert len(order) == len(RATIOS)
    shares = [float(entry.split()[1]) for entry in order]
    assert shares == sorted(shares)
    assert "a step takes 64, worth" in text and "noise prevails: with 128 prompts" in text


@pytest.mark.parametrize(
    ("critical", "advice"),
    [
        (
            640.0,
            "640 prompts, and a step takes 64, worth 9% of one without noise; noise prevails: with 128 prompts a "
            "step would be worth 1.8 times as much.",
        ),
        (64.0, "worth 50% of one without noise; the batch is about right."),
        (
            16.0,
            "worth 80% of one without noise; fewer prompts would do: with half of them a step would still be worth "
            "83% as much.",
        ),
    ],
)
def test_batch_advice(critical, advice):
    """B = 640, Q = 64: 64/704 = 1/11 against 128/768 = 1/6. B = 16: 64/80 against 32/48, which is 5/6 of it."""
    records = [{"step": step, "snr/critical_batch_size": critical} for step in range(1, 9)]
    assert batch_advice(History(Path(), records, {"num_prompts": 64}, {})).endswith(advice)
    assert batch_advice(History(Path(), [{"step": 1}], {"num_prompts": 64}, {})) == ""


def test_shrink_on_its_floor_is_no_alarm_under_another_schedule(tmp_path):
    records = [record | {"snr/shrink_ema": 0.1} for record in synthetic_records(100)]
    text, _ = report_from(tmp_path, records, config=CONFIG | {"algo": CONFIG["algo"] | {"schedule": "constant"}})
    assert "No alarm" in text


def test_no_step_yet_and_no_run_are_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match="no metrics here"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="no step is logged yet"):
        write_report(tmp_path)
    write_run(tmp_path, synthetic_records(2))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"not a JSON file.*config\.json"):
        write_report(tmp_path)


def test_values_are_placed_where_the_axis_says(tmp_path):
    """A straight line from (0, 0) to (10, 1) must come out as the diagonal of the canvas."""
    records = [{"step": step, "eval/line/accuracy": step / 10} for step in range(0, 11, 5)]
    text, _ = report_from(tmp_path, records)
    assert 'class="line s1" d="M0.0 1000.0L500.0 500.0L1000.0 0.0"' in text
    assert 'class="mark s1" d="M0 1000h.01M500 500h.01M1000 0h.01"' in text


def test_stacked_seconds_reach_the_step_time(tmp_path):
    """Two phases of 1 s in steps of 3 s: edges at 0, 1, 2 and 3 of an axis that ends at 3."""
    record = {"timing_s/rollout": 1.0, "timing_s/push": 1.0, "timing_s/step": 3.0}
    text, _ = report_from(tmp_path, [{"step": 1, **record}, {"step": 2, **record}])
    outlines = re.findall(r'class="layer s\d" d="M([^"]*)Z"', text)
    heights = [sorted({float(point.split()[1]) for point in outline.split("L")}) for outline in outlines]
    assert heights == [pytest.approx([666.7, 1000.0]), pytest.approx([333.3, 666.7]), pytest.approx([0.0, 333.3])]
    assert re.findall(r"</i>(\w+) <b>(.+?)</b>", text) == [("rollout", "1.0 s"), ("push", "1.0 s"), ("other", "1.0 s")]


def test_evaluation_time_is_left_out_of_the_stack(tmp_path):
    record = {"step": 1, "timing_s/rollout": 1.0, "timing_s/evaluate": 5.0, "timing_s/step": 6.0}
    text, _ = report_from(tmp_path, [record])
    assert re.findall(r"</i>(\w+) <b>(.+?)</b>", text) == [("rollout", "1.0 s"), ("other", "0 s")]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.0, 0.93), (-3.2, 7.1), (5.0, 5.0), (0.0, 0.0), (0.0, 1e-309), (1e-9, 3e-9), (-2e7, -1e7)],
)
def test_linear_axes_hold_their_data_on_round_ticks(low, high):
    axis = linear_axis(low, high, 5)
    assert axis.low <= low
    assert high <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    gaps = np.diff(axis.ticks)
    assert np.allclose(gaps, gaps[0])
    leading = float(f"{gaps[0]:.6e}".split("e")[0])
    assert leading in (1.0, 2.0, 2.5, 5.0)


@pytest.mark.parametrize(
    ("low", "high"), [(1e-6, 3e-6), (2e-6, 2e-6), (1e-7, 1.0), (0.5, 5.0), (11.0, 264.0), (1e-300, 1e300)]
)
def test_log_axes_hold_their_data(low, high):
    axis = log_axis(low, high, 5)
    assert axis.low <= low * 1.001
    assert high <= axis.high * 1.001
    assert 2 <= len(axis.ticks) <= 7
    assert axis.low <= axis.ticks[0]
    assert axis.ticks[-1] <= axis.high
    places = axis.place(np.array([low, high]))
    assert 0 <= places[0] <= places[1] <= 1


def test_log_axis_places_by_ratio():
    axis = log_axis(1.0, 100.0, 5)
    assert (axis.low, axis.high) == (1.0, 100.0)
    np.testing.assert_allclose(axis.place(np.array([1.0, 10.0, 100.0, -5.0])), [0.0, 0.5, 1.0, 0.0])


@pytest.mark.parametrize("last", [0, 1, 2, 7, 150, 10_000])
def test_step_axis_has_whole_ticks_up_to_the_last_step(last):
    axis = step_axis(last)
    assert (axis.low, axis.high) == (0.0, max(1, last))
    assert all(tick == int(tick) <= axis.high for tick in axis.ticks)
    assert len(axis.ticks) >= 2


def test_smoothing_keeps_constants_and_lines_and_takes_out_noise():
    np.testing.assert_allclose(smooth(np.full(200, 3.5)), 3.5)
    line = np.linspace(0, 1, 300)
    np.testing.assert_allclose(smooth(line)[40:-40], line[40:-40], atol=1e-9)
    noise = np.random.default_rng(0).normal(size=2000)
    assert smooth(noise).std() < 0.15 * noise.std()
    few = np.arange(10.0) ** 2
    np.testing.assert_array_equal(smooth(few), few)


def test_thinning_keeps_the_ends_and_the_extremes():
    steps = np.arange(1.0, 50_001)
    values = np.random.default_rng(0).normal(size=50_000)
    values[[77, 40_123]] = 50, -50
    line_steps, _ = thin_line(steps, values)
    assert (line_steps[0], line_steps[-1]) == (1, 50_000)
    assert len(line_steps) <= 400
    point_steps, point_values = thin_points(steps, values)
    assert {50.0, -50.0} <= set(point_values)
    assert len(point_steps) <= 1200
    np.testing.assert_array_equal(values[point_steps.astype(int) - 1], point_values)


def test_history_reads_dotted_settings():
    history = History(Path(), [{"step": 1}], {"algo": {"snr": {"floor": 0.1}}, "seed": 3}, {})
    assert history.setting("algo.snr.floor") == 0.1
    assert history.setting("seed.more", "none") == "none"
    assert history.setting("algo.absent") is None
