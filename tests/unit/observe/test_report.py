"""The report: its content, that it is self-contained, and that no course of a run breaks it.

The page is parsed; the tests compare elements, coordinates and numbers with the run (synthetic_run.py). Not covered:
how the page looks, and the values shown under the pointer, which need a browser.
"""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder

import numpy as np
import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import METRICS
from oblr_megatron.observe.alarm_window import Planned
from oblr_megatron.observe.alarms import AlarmWatch
from oblr_megatron.observe.report import write_report
from oblr_megatron.observe.report.axes import linear_axis, log_axis, step_axis
from oblr_megatron.observe.report.costs import RANKED, memory_of_ranks
from oblr_megatron.observe.report.history import RunHistory, load_history, smooth, thinned
from oblr_megatron.observe.report.panel import batch_advice, batch_size, group_advice
from oblr_megatron.observe.report.sections import sections
from oblr_megatron.timing import PHASES
from tests.unit.synthetic_run import CONFIG, ENVIRONMENT, RATIOS, synthetic_records, write_run

NAMES = [
    metric.name.replace("<set>", "sums")
    .replace("<source>", "sums")
    .replace("<term>", "overlong")
    .replace("<name>", name)
    .replace("<phase>", phase)
    for metric in METRICS
    for name in (RATIOS if "<name>" in metric.name else ("",))
    for phase in (PHASES[:6] if "<phase>" in metric.name else ("",))
]
OUTSIDE = {"src", "href", "xlink:href", "action", "srcset", "data", "poster"}  # attributes that load or link


class Page(HTMLParser):
    """A report as an element tree; tags must close in order, and no attribute may appear twice."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        path = write_report(run_dir)
        assert path == run_dir / "report.html"
        self.text = path.read_text(encoding="utf-8")
        self._tree, self._open = TreeBuilder(), list[str]()
        self.feed(self.text)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        self.root: Element = self._tree.close()
        written = "".join("".join(element.itertext()) for element in self.root.findall("./body/main"))
        written += "".join(value for element in self.root.iter() for value in element.attrib.values())
        assert not re.search(r"\bnan\b|NaN|Infinity|\binf\b|None", written)

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self._tree.start(tag, {name: value or "" for name, value in attrs})
        self._tree.end(tag) if tag == "meta" else self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, f"</{tag}> after {self._open[-3:]}"
        self._tree.end(tag)

    def handle_data(self, data):
        if self._open:
            self._tree.data(data)

    def all(self, tag: str, cls: str = "") -> list[Element]:
        """Elements of a tag that have all classes of `cls`."""
        wanted = set(cls.split())
        return [element for element in self.root.iter(tag) if wanted <= set(element.get("class", "").split())]

    def texts(self, tag: str, cls: str = "") -> list[str]:
        return ["".join(element.itertext()) for element in self.all(tag, cls)]

    def tiles(self) -> dict[str, tuple[str, str]]:
        """Headlines: label -> (value, note)."""
        tiles = [["".join(part.itertext()) for part in tile] for tile in self.all("div", "tile")]
        return {label: (value, note) for label, value, note in tiles}

    def legend(self) -> list[tuple[str, str]]:
        """(label, value) of every legend entry."""
        entries = self.all("span", "entry")
        return [("".join(entry.itertext()).removesuffix(entry[1].text).strip(), entry[1].text) for entry in entries]

    def missing(self) -> set[str]:
        """Titles of the charts without logged metrics."""
        return {title for text in self.texts("p", "missing") for title in re.split(", ", text.partition(": ")[2][:-1])}

    def paths(self, cls: str) -> list[list[list[float]]]:
        """[[x, y], ...] of every SVG path with these classes."""
        points = [re.findall(r"[ML]([\d.-]+ [\d.-]+)", path.get("d", "")) for path in self.all("path", cls)]
        return [[[float(number) for number in point.split()] for point in path] for path in points]

    def caption(self, title: str) -> str:
        """A chart's caption, without its alarming part."""
        return next(one.find("figcaption").text for one in self.all("figure") if one.findtext("h3") == title)

    def no_alarm(self) -> bool:
        assert len(self.all("p", "sound")) + len(self.all("ul", "alarms")) == 1
        return not self.all("ul", "alarms")


def page_of(tmp_path: Path, records: list[dict], **files) -> Page:
    return Page(write_run(tmp_path / "run", records, **files))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_every_chart_and_every_metric_is_there(tmp_path):
    page = page_of(tmp_path, synthetic_records(150))
    titles = [chart.title for section in sections(load_history(tmp_path / "run")).values() for chart in section]
    assert page.texts("h3") == titles and len(titles) == 27
    assert "Held-out accuracy: sums" in titles
    assert len(page.all("span", "alarming")) == len(page.all("figcaption")) == len(titles)
    assert page.missing() == set() and page.no_alarm()
    assert set(NAMES) <= set(page.texts("th"))


def test_every_metric_is_drawn_or_counted_by_an_alarm(tmp_path):
    history = load_history(write_run(tmp_path, synthetic_records(30)))
    charts = [chart for section in sections(history).values() for chart in section]
    drawn = {curve.metric for chart in charts for panel in chart.panels for curve in panel.curves}
    elsewhere = {
        *("step", "reward/std", "reward/failures", "reward/timeouts", "rewards/overlong/mean", "rewards/overlong/std"),
        *("gradnorm/nonfinite", "baseline/self_dependence", "weights/version", "data/epoch", "data/skipped"),
        "perf/peak_memory_rank",
        *(name for name in NAMES if name.startswith("perf/ranks/") and name.split("/")[2] not in RANKED),
        *(f"perf/ranks/{phase}/slowest" for phase in RANKED),
    }
    names = {name for name in NAMES if not name.startswith("timing_s/")}
    assert drawn | elsewhere == names
    assert not drawn & elsewhere


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = page_of(tmp_path, synthetic_records(40))
    assert not re.search(r"http|@import|url\(", page.text, re.IGNORECASE)
    for element in page.root.iter():
        assert not set(element.attrib) & OUTSIDE, element.tag
        assert element.tag not in ("link", "iframe", "object", "embed", "img")


def test_header_and_headlines(tmp_path):
    records = synthetic_records(150)
    page = page_of(tmp_path, records)
    assert page.texts("h1") == ["run"]
    (subtitle,) = page.texts("p", "subtitle")
    assert subtitle.split(" · ") == ["tiny-qwen3", "optimal baseline", "snr schedule", "seed 0"]
    facts = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert facts["layout"] == "TP 1 x PP 1 x DP 2, 2 ranks"
    assert facts["batch"] == "64 prompts x 8 responses"
    assert facts["started"] == "2030-01-02 03:04:05 UTC"
    assert "torch 2.13.0" in facts["versions"].split(", ")
    before, after = records[0]["eval/sums/accuracy"], records[-1]["eval/sums/accuracy"]
    value, note = page.tiles()["sums: greedy accuracy"]
    assert value == f"{before:.2f}→{after:.2f}" and note.split()[0] == f"{100 * (after - before):+.1f}"
    assert page.tiles()["steps"] == ("150", "of 150, finished")


def test_the_layout_counts_context_parallel_ranks(tmp_path):
    parallel = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
    config, environment = CONFIG | {"parallel": parallel}, ENVIRONMENT | {"world_size": 8}
    page = page_of(tmp_path, synthetic_records(1), config=config, environment=environment)
    facts = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert facts["layout"] == "TP 2 x PP 1 x CP 2 x DP 2, 8 ranks, sequence parallel"


def test_text_of_the_run_is_escaped(tmp_path):
    records = [record | {"eval/<b>&/accuracy": 0.5} for record in synthetic_records(3)]
    config = CONFIG | {"model": {"path": "models/<script>alert(1)</script>", "dtype": "float32"}}
    page = Page(write_run(tmp_path / "a<b&c", records, config=config))
    assert len(page.all("script")) == 1
    assert page.texts("h1") == ["a<b&c"]
    assert "eval/<b>&/accuracy" in page.texts("th")
    assert CONFIG["data"]["template"] in page.texts("td")


def test_one_step(tmp_path):
    page = page_of(tmp_path, synthetic_records(1, evaluate_every=0), config=CONFIG | {"num_steps": 1})
    assert page.tiles()["steps"] == ("1", "of 1, finished")
    assert page.missing() == {"Held-out accuracy"}
    assert len(page.all("h3")) == 26


def test_only_an_evaluation_so_far(tmp_path):
    records = synthetic_records(1)[:1]
    page = page_of(tmp_path, records)
    assert page.texts("h3") == ["Held-out accuracy: sums"]
    assert page.tiles()["sums: greedy accuracy"][0] == f"{records[0]['eval/sums/accuracy']:.2f}"
    assert page.tiles()["steps"] == ("0", "of 150, so far")


def test_a_run_in_progress_with_a_half_written_line(tmp_path):
    run = write_run(tmp_path, synthetic_records(150)[:74])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 74, "rew')
    assert Page(run).tiles()["steps"] == ("73", "of 150, so far")


def test_without_config_and_environment(tmp_path):
    page = page_of(tmp_path, synthetic_records(30), config=None, environment=None)
    assert page.texts("p", "subtitle") == ["model not recorded"] and not page.all("dt")


@pytest.mark.parametrize("missing", sorted({name.partition("/")[0] for name in synthetic_records(1)[1]} - {"step"}))
def test_a_family_of_metrics_may_be_missing(tmp_path, missing):
    records = [
        {name: value for name, value in record.items() if name.partition("/")[0] != missing}
        for record in synthetic_records(30)
    ]
    page = page_of(tmp_path, records)
    (table,) = page.all("table", "metrics")
    assert missing not in {row.findtext("th").partition("/")[0] for row in table.findall("./tbody/tr")}
    assert len(page.all("h3")) + len(page.missing()) == 27 - (
        missing in ("actor", "environment", "moe", "pool", "rollout", "rollout_corr")
    )


def test_pools_are_drawn_before_a_prompt_comes_again(tmp_path):
    later = {"pool/pull", "pool/trust"}
    records = [{name: value for name, value in record.items() if name not in later} for record in synthetic_records(30)]
    page = page_of(tmp_path, records)
    assert "Pools of earlier rewards" in page.texts("h3") and len(page.all("h3")) == 27


def test_only_steps(tmp_path):
    page = page_of(tmp_path, [{"step": 1}, {"step": 2}])
    assert not page.all("h3") and len(page.missing()) == 21


@pytest.mark.parametrize("value", [None, 0, 0.0, -1.0, 1e-300, 1e300])
def test_any_value_everywhere(tmp_path, value):
    records = [
        {name: step if name == "step" else value for name in record}
        for step, record in enumerate(synthetic_records(25))
    ]
    page = page_of(tmp_path, records)
    assert any(text.startswith("Not finite") for text in page.texts("li")) == (value is None)
    assert all(0 <= number <= 1000 for path in page.paths("") for point in path for number in point)


def test_a_curve_without_a_positive_average_is_left_out_of_a_logarithmic_axis(tmp_path):
    """The estimator "momentum" may give a negative noise, and a few positive values among them."""
    records = synthetic_records(60)
    for record in records[1:]:
        record["snr/noise_trace"] = 0.1 if record["step"] == 30 else -2.0
    labels = [label for label, _ in page_of(tmp_path, records).legend()]
    assert "noise, trace" not in labels and "signal, squared norm" in labels


def test_single_nulls_leave_gaps(tmp_path):
    records = synthetic_records(60)
    for record in records[1::7]:
        record["reward/mean"] = record["lr"] = record["timing_s/step"] = record["rollout/logprob_abs_diff"] = None
    (alarm,) = page_of(tmp_path, records).texts("li")
    counted = {"reward/mean": 9, "lr": 9, "timing_s/step": 9, "rollout/logprob_abs_diff": 9}
    assert {name: int(count) for name, count in re.findall(r"(\S+) x(\d+)", alarm)} == counted


def test_a_long_run_stays_a_small_file(tmp_path):
    page = page_of(tmp_path, synthetic_records(5000, evaluate_every=250), config=CONFIG | {"num_steps": 5000})
    assert len(page.text) < 52_000 * len(page.all("h3")), "bytes a chart"
    assert all(len(path.get("d")) < 25_000 for path in page.all("path"))


def test_the_fullest_ranks_are_drawn(tmp_path):
    """Of ten ranks the eight that hold most; lines of another layout and an unfinished line are skipped."""
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
    assert {(f"rank {rank}", str(rank + 1)) for rank in range(1, 9)} <= set(Page(run).legend())
    assert not memory_of_ranks(tmp_path).curves


def test_the_pointers_data_match_the_legend(tmp_path):
    page = page_of(tmp_path, synthetic_records(90))
    plots, resting = page.all("div", "plot"), [value for _, value in page.legend()]
    assert len(plots) == 60 and {plot.get("data-last") for plot in plots} == {"90"}
    curves = [curve for plot in plots for curve in json.loads(plot.get("data-curves"))]
    assert len(curves) == len(resting)
    for curve in curves:
        assert len(curve["x"]) == len(curve["y"])
        assert curve["x"] == sorted(curve["x"]) and curve["x"][-1] <= 90
    stacked = len(page.all("path", "layer"))  # the legend of a stack shows averages
    assert sum(curve["y"][-1] != value for curve, value in zip(curves, resting, strict=True)) <= stacked


def test_alarms_are_listed_with_current_numbers_and_their_first_step(tmp_path):
    """What raises which alarm is tested in test_alarms.py."""
    records, watch = synthetic_records(100, evaluate_every=0), AlarmWatch(Planned())
    for record in records:
        record["response_length/truncated_fraction"] = record["step"] / 100
        record["reward/failures"] = int(record["step"] < 4)
        watch.check(record)
    page = page_of(tmp_path, records)
    assert [item.text.strip() for item in page.all("li")] == [alarm.text for alarm in watch.all()]
    assert [numbers(item.text)[:2] for item in page.all("li")] == [[0, 3], [11, 90]]
    assert [numbers(text) for text in page.texts("span", "since")] == [[1], [40]]


def test_the_order_of_baselines_and_the_advice_on_the_batch_size(tmp_path):
    page = page_of(tmp_path, synthetic_records(150))
    ranking = re.findall(r"(\w+) (\d\.\d\d)", page.caption("Variance under every baseline"))
    assert [ranking[0][0], ranking[-1][0]] == ["optimal", "none"] and len(ranking) == len(RATIOS)
    shares = [float(ratio) for _, ratio in ranking]
    assert shares == sorted(shares) and shares[0] < 1 and shares[-1] > 4
    assert {64, 128} <= set(numbers(page.caption("Batch size")))


@pytest.mark.parametrize(
    ("critical", "said"), [(640.0, [640, 64, 9, 128, 1.8]), (64.0, [64, 64, 50]), (16.0, [16, 64, 80, 83])]
)
def test_batch_advice(critical, said):
    """B = 640, Q = 64: 64/704 = 1/11 against 128/768 = 1/6. B = 16: 64/80 against 32/48, which is 5/6 of it."""
    records = [{"step": step, "snr/critical_batch_size": critical} for step in range(1, 9)]
    assert numbers(batch_advice(RunHistory(Path(), records, {"num_prompts": 64}, {}))) == said
    assert batch_advice(RunHistory(Path(), [{"step": 1}], {"num_prompts": 64}, {})) == ""
    records += [{"step": step, "snr/shrink_ema": 0.1} for step in range(9, 30)]
    assert "no signal" in batch_advice(RunHistory(Path(), records, {"num_prompts": 64}, {}))


def test_several_updates_on_a_batch_get_no_advice_on_its_size():
    """The critical size is that of one update, which takes a part of the prompts."""
    records = [{"step": step, "snr/critical_batch_size": 64.0} for step in range(1, 9)]
    advice = {}
    for updates in (1, 4):
        spec = batch_size(RunHistory(Path(), records, {"num_prompts": 64, "algo": {"updates_per_batch": updates}}, {}))
        advice[updates] = "is worth" in spec.caption, len(spec.panels[0].rules)
    assert advice == {1: (True, 1), 4: (False, 0)}


@pytest.mark.parametrize(
    ("size", "between", "within", "best", "said"),
    [
        (8, 100.0, 50.0, 1 + 3.5**0.5, [67, 3, 1.5]),  # V_w = 350: 8 x 150 against 3 x (100 + 175)
        (3, 100.0, 175.0, 1 + 3.5**0.5, [36, 3]),
        (4, 10.0, 20.0, 1.0, [33, 1, 1.3]),  # b reads no response: V_w = 80, 4 x 30 against 10 + 80
    ],
)
def test_group_advice(size, between, within, best, said):
    split = {"snr/between": between, "snr/within": within, "snr/best_group_size": best}
    records = [{"step": step} | split for step in range(1, 9)]
    assert numbers(group_advice(RunHistory(Path(), records, {"group_size": size}, {}))) == said
    assert group_advice(RunHistory(Path(), [{"step": 1}], {"group_size": size}, {})) == ""


def test_an_alarm_that_depends_on_settings_is_the_runs_own(tmp_path):
    """The config is that of the last attempt; an earlier one may have planned the lower rate."""
    records = [record | {"lr": 1e-4} for record in synthetic_records(100)]
    run = write_run(tmp_path, records)
    assert Page(run).no_alarm()
    (run / "alarms.jsonl").write_text(
        '{"name": "rate", "step": 41, "text": "The learning rate has collapsed", "cause": ""}\n'
    )
    assert Page(run).texts("li") == ["The learning rate has collapsed first at step 41"]


def test_unreadable_runs_name_the_file(tmp_path):
    def where() -> str:
        with pytest.raises(UserError) as error:
            write_report(tmp_path)
        return error.value.where

    assert where() == str(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").touch()
    assert where() == str(tmp_path)
    write_run(tmp_path, synthetic_records(2))
    (tmp_path / "config.json").write_text("{")
    assert where() == str(tmp_path / "config.json")


def test_values_are_placed_where_the_axis_says(tmp_path):
    """A straight line from (0, 0) to (10, 1) must come out as the diagonal of the canvas."""
    page = page_of(tmp_path, [{"step": step, "eval/line/accuracy": step / 10} for step in range(0, 11, 5)])
    assert page.paths("line s1") == page.paths("mark s1") == [[[0, 1000], [500, 500], [1000, 0]]]
    lefts = {label.text: numbers(label.get("style"))[0] for label in page.all("span", "x")}
    tops = {label.text: numbers(label.get("style"))[0] for label in page.all("span", "y")}
    assert (lefts["0"], lefts["10"], tops["0"], tops["1"]) == (0, 100, 100, 0)


@pytest.mark.parametrize("low", [0.9991, 1 - 3e-7])
def test_an_axis_that_does_not_begin_at_zero_has_distinct_labels(low, tmp_path):
    page = page_of(tmp_path, [{"step": step, "rollout/weight_mean": low if step else 1.0} for step in range(5)])
    labels = [label.text for label in page.all("span", "y")]
    assert len(set(labels)) == len(labels) > 2


def test_stacked_seconds_reach_the_step_time(tmp_path):
    """Two phases of 1 s in steps of 3 s: edges at 0, 1, 2 and 3 of an axis that ends at 3."""
    record = {"timing_s/rollout": 1.0, "timing_s/push": 1.0, "timing_s/step": 3.0}
    page = page_of(tmp_path, [{"step": 1, **record}, {"step": 2, **record}])
    heights = [sorted({y for _, y in outline}) for outline in page.paths("layer")]
    assert heights == [pytest.approx([666.7, 1000.0]), pytest.approx([333.3, 666.7]), pytest.approx([0.0, 333.3])]
    assert page.legend() == [("rollout", "1.0 s"), ("push", "1.0 s"), ("other", "1.0 s")]


def test_evaluation_time_is_left_out_of_the_stack(tmp_path):
    record = {"step": 1, "timing_s/rollout": 1.0, "timing_s/evaluate": 5.0, "timing_s/step": 6.0}
    assert page_of(tmp_path, [record]).legend() == [("rollout", "1.0 s"), ("other", "0 s")]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.0, 0.93), (-3.2, 7.1), (5.0, 5.0), (0.0, 0.0), (0.0, 1e-309), (1e-9, 3e-9), (-2e7, -1e7)],
)
def test_linear_axes_hold_their_data_on_round_ticks(low, high):
    axis = linear_axis(low, high, 5)
    assert axis.low <= low and high <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    gaps = np.diff(axis.ticks)
    assert np.allclose(gaps, gaps[0])
    assert float(f"{gaps[0]:.6e}".split("e")[0]) in (1.0, 2.0, 2.5, 5.0)


@pytest.mark.parametrize(
    ("low", "high"), [(1e-6, 3e-6), (2e-6, 2e-6), (1e-7, 1.0), (0.5, 5.0), (11.0, 264.0), (1e-300, 1e300)]
)
def test_log_axes_hold_their_data(low, high):
    axis = log_axis(low, high, 5)
    assert axis.low <= low * 1.001 and high <= axis.high * 1.001
    assert 2 <= len(axis.ticks) <= 7
    assert axis.low <= axis.ticks[0] and axis.ticks[-1] <= axis.high
    places = axis.place(np.array([low, high]))
    assert 0 <= places[0] <= places[1] <= 1


@pytest.mark.parametrize(("low", "high"), [(5e-324, 1.0), (1.0, 1.7e308), (5e-324, 5e-324), (1.7e308, 1.7e308)])
def test_a_log_axis_of_extreme_values_is_finite(low, high):
    axis = log_axis(low, high, 2)
    assert 0 < axis.low < axis.high < math.inf
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
    line_steps, _ = thinned(steps, values, limit=400)
    assert (line_steps[0], line_steps[-1]) == (1, 50_000)
    assert len(line_steps) <= 400
    point_steps, point_values = thinned(steps, values, limit=900, extremes=20)
    assert {50.0, -50.0} <= set(point_values)
    assert len(point_steps) <= 900
    np.testing.assert_array_equal(values[point_steps.astype(int) - 1], point_values)


def test_history_reads_dotted_settings():
    history = RunHistory(Path(), [{"step": 1}], {"algo": {"snr": {"floor": 0.1}}, "seed": 3}, {})
    assert history.setting("algo.snr.floor") == 0.1
    assert history.setting("seed.more", "none") == "none"
    assert history.setting("algo.absent") is None
