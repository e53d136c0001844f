"""Alarms: a faulty run raises the matching one once, and a healthy run raises none.

Not covered: a run with ranks and engines (tests/distributed/test_run_controls.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from oblr_megatron.metrics import Record
from oblr_megatron.observe.alarm_window import EDGE, Course, Planned, planned
from oblr_megatron.observe.alarms import ALARMS_FILE, CHECKS, Alarm, AlarmWatch, LiveAlarms, _written, alarms_of
from tests.unit.synthetic_run import synthetic_records

PLANNED = Planned(lr=1e-3, lr_warmup_steps=10, num_prompts=64, noise_prompts=64, group_size=8)
STEPS = 200
LATER = STEPS // 2


def records_with(name: str, course: Callable[[int], float | None], num_steps: int = STEPS) -> list[Record]:
    """A healthy run except for one metric."""
    return [record | {name: course(int(record["step"]))} for record in synthetic_records(num_steps, evaluate_every=0)]


def set_off(records: Iterable[Record], settings: Planned = PLANNED) -> list[Alarm]:
    """All alarms in the order raised."""
    watch = AlarmWatch(settings)
    return [alarm for record in records for alarm in watch.check(record)]


def rising(low: float, high: float) -> Callable[[int], float]:
    return lambda step: low if step <= LATER else high


CASES: dict[str, tuple[str, Callable[[int], float | None], list[str]]] = {
    "nonfinite": ("grad_norm", lambda step: None if step == 9 else 1.0, ["grad_norm x1"]),
    "mismatch": ("rollout/logprob_abs_diff", lambda step: 2e-4 * 1.03**step, ["nats"]),
    "weights": ("rollout/weight_mean", rising(1.0, 0.06), ["0.06", "rollout.importance_sampling"]),
    "unrecorded": ("rollout/unrecorded_fraction", rising(0.001, 0.06), ["6.0%", "algo.center_tokens"]),
    "gradnorm": ("gradnorm/nonfinite", lambda step: int(step == 7), ["1", "optimizer.lr"]),
    "failures": ("reward/failures", lambda step: 2 * int(step == 7), ["2", "log"]),
    "timeouts": ("reward/timeouts", lambda step: 2 * int(step == 7), ["2", "reward.timeout_s"]),
    "episodes": ("environment/failures", lambda step: 2 * int(step == 7), ["2", "logs/environment-"]),
    "reward": ("reward/mean", rising(0.8, 0.5), ["0.8", "optimizer.lr"]),
    "rate": ("lr", rising(1e-3, 3e-4), ["33%", "34", "30%", "num_prompts"]),
    "group_size": ("snr/best_group_size", rising(3.0, 1.0), ["2.3", "1", "512"]),
    "batch_size": ("snr/critical_batch_size", rising(80.0, 6400.0), ["64", "1.9%", "num_prompts"]),
    "tempering": ("snr/shrink_ema", rising(0.4, 0.9), ["90%", "algo.norm_power"]),
    "clipped": ("optimizer/clip_factor", rising(1.0, 0.25), ["11", "20", "optimizer.clip_grad"]),
    "spread": ("baseline/spread", rising(0.2, 3.0), ["1.6", "pooled"]),
    "self_dependence": ("baseline/self_dependence", lambda _: 0.125, ["0.12", "pooled"]),
    "entropy": ("entropy", rising(2.0, 0.01), ["2", "algo.kl_coefficient"]),
    "truncation": ("response_length/truncated_fraction", rising(0.02, 0.4), ["2%", "rollout.max_response_tokens"]),
    "mixed": ("groups/mixed_fraction", rising(0.6, 0.01), ["1%"]),
    "slow_rank": ("perf/slowest_rank_ratio", rising(1.1, 1.5), ["Rank 1", "1.5", "20"]),
}
"""Alarm -> (metric, its values by step, parts of the text)."""


def test_every_check_has_a_case() -> None:
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_is_raised_once_with_number_and_remedy(name: str) -> None:
    metric, course, parts = CASES[name]
    found = set_off(records_with(metric, course))
    assert [alarm.name for alarm in found] == [name]
    assert all(re.search(rf"(?<![\w.]){re.escape(part)}(?!\w)", found[0].text) for part in parts), found[0].text
    assert found[0].text.count(";") == 1 and "\n" not in found[0].text
    at_once = {"nonfinite": 9, "gradnorm": 7, "failures": 7, "timeouts": 7, "episodes": 7, "self_dependence": 1}
    if name in at_once:
        assert found[0].step == at_once[name]
    else:
        assert {"rate": LATER + 30, "mismatch": 2 * EDGE}.get(name, LATER) <= found[0].step <= LATER + 40


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_steps", [1, 61, 400])
def test_a_healthy_run_raises_none(seed: int, num_steps: int) -> None:
    """Reward, entropy, lengths and rates move as they do in training, with noise."""
    assert set_off(synthetic_records(num_steps, seed=seed)) == []


def test_failures_and_timeouts_have_remedies_of_their_own() -> None:
    watch = AlarmWatch(PLANNED)
    late = watch.check({"step": 1, "reward/failures": 3, "reward/timeouts": 3})
    both = watch.check({"step": 2, "reward/failures": 5, "reward/timeouts": 1}, "ValueError: no number in it")
    assert [alarm.name for alarm in (*late, *both)] == ["timeouts", "failures"]
    assert " 3;" in late[0].text and "reward.timeout_s" in late[0].text
    assert " 4;" in both[0].text and "ValueError: no number in it" in both[0].text
    assert "reward.timeout_s" not in both[0].text
    late_episodes = {"step": 1, "reward/timeouts": 2, "environment/timeouts": 2}
    found = {alarm.name: alarm.text for alarm in AlarmWatch(PLANNED).check(late_episodes)}
    assert "rollout.environment.deadline_s" in found["timeouts"] and "episodes" in found


def test_a_reward_that_falls_with_the_first_updates_is_compared_with_the_first_step() -> None:
    """The first 20 steps, which other falls are compared with, are low already. 64 prompts: an error of 0.056."""
    draw = np.random.default_rng(0)
    start: Record = {"step": 1, "reward/mean": 0.28, "reward/std": 0.45}
    low: list[Record] = [{"step": step, "reward/mean": 0.05 + draw.normal(0, 0.03)} for step in range(2, 40)]
    (alarm,) = set_off([start, *low])
    assert alarm.name == "reward" and "0.28 in the first step" in alarm.text and "lr_warmup_steps" in alarm.text
    assert not set_off([start | {"reward/mean": 0.2}, *low]), "within four errors"
    assert not set_off([start, *low], Planned()), "the number of prompts is not known"


def test_a_first_step_without_a_mistake_is_luck() -> None:
    """One of five runs of 32 prompts that are right 19 of 20 times begins so. It has no spread of its own."""
    wrong = [0, *(1 + step % 2 for step in range(39))]
    records = [
        {"step": step, "reward/mean": 1 - count / 32, "reward/std": 0.2 if count else 0.0}
        for step, count in enumerate(wrong, 1)
    ]
    assert not set_off(records, Planned(num_prompts=32))


def test_a_long_run_with_a_flat_reward_raises_none() -> None:
    """The test for a falling reward is repeated every step."""
    draw = np.random.default_rng(0)
    assert set_off({"step": step, "reward/mean": 0.5 + draw.normal(0, 0.05)} for step in range(20_000)) == []


def test_harmless_courses_raise_none() -> None:
    for name, course in (
        ("lr", lambda step: 1e-4 if step % 40 > 15 else 5e-4),  # rises again
        ("lr", lambda step: 1e-4 if step <= 10 else 1e-3),  # warm-up
        ("snr/critical_batch_size", lambda step: 6400.0 if step < 50 else 80.0),  # before the averages have settled
        ("snr/best_group_size", lambda _: 2.0),  # less than twice the noise
        ("rollout/logprob_abs_diff", lambda step: 1e-6 * 1.03**step),  # rounding
        ("entropy", lambda step: 0.6 if step < LATER else 0.04),  # with a reward that rises
        ("response_length/truncated_fraction", lambda _: 0.3),  # no more than at the start
        ("baseline/self_dependence", lambda _: 1e-12),
        ("entropy", lambda _: 0.0),
        ("gradnorm/length_corr", lambda _: None),
    ):
        assert set_off(records_with(name, course)) == [], name
    assert set_off(records_with("lr", lambda _: 1e-4), Planned()) == [], "another schedule"
    assert set_off(records_with("groups/mixed_fraction", lambda _: 0.0), Planned(group_size=1)) == []


def test_a_batch_far_above_the_critical_size_is_too_large() -> None:
    (found,) = set_off(records_with("snr/critical_batch_size", lambda _: 4.0))
    assert found.name == "batch_size" and "lower num_prompts" in found.text and "94%" in found.text


def test_averages_without_a_signal_ask_for_more_prompts() -> None:
    """Such steps log no critical size. A few of them among others raise nothing."""
    silent = [{"step": step, "snr/shrink_ema": 0.1} for step in range(1, 100)]
    (found,) = set_off(silent)
    assert found.name == "batch_size" and "no signal" in found.text and "raise num_prompts" in found.text
    some = [record | ({} if step % 3 == 0 else {"snr/critical_batch_size": 80.0}) for step, record in enumerate(silent)]
    assert set_off(some) == []


def test_the_number_of_prompts_that_is_asked_for_is_a_multiple_of_the_folds() -> None:
    settings = Planned(num_prompts=32, group_size=16, num_folds=4)
    split = {"snr/between": 90.0, "snr/within": 24.0, "snr/best_group_size": 3.0}
    found = set_off([record | split for record in synthetic_records(STEPS, evaluate_every=0)], settings)
    assert "set group_size to 3 and num_prompts to 172." in next(one.text for one in found if one.name == "group_size")


def test_a_line_of_another_version_is_skipped(tmp_path: Path) -> None:
    known = {"name": "entropy", "step": 3, "text": "low", "cause": ""}
    lines = [known, known | {"new": 1}]
    (tmp_path / "alarms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(_written(tmp_path / "alarms.jsonl")) == 1


def test_the_settings_that_checks_compare_with() -> None:
    table = {"optimizer.lr": 1e-3, "algo.schedule": "snr", "num_prompts": 64, "group_size": 8}
    assert planned(table.get) == Planned(lr=1e-3, num_prompts=64, noise_prompts=64, group_size=8)
    assert planned((table | {"algo.schedule": "cosine"}).get).lr == 0.0, "a rate that is meant to fall"
    several = planned((table | {"algo.updates_per_batch": 4}).get)
    assert several == Planned(lr=1e-3, num_prompts=64, group_size=8), "its noise is that of one update"
    for baseline, of_earlier_steps in (("pooled", True), ("optimal_pooled", True), ("optimal", False)):
        assert planned({"algo.baseline": baseline}.get) == Planned(of_earlier_steps=of_earlier_steps)
    assert planned({"algo.baseline": "of another version"}.get) == planned({}.get) == Planned()


def test_rewards_of_earlier_steps_may_vary_more_than_those_of_a_solved_task() -> None:
    solved: list[Record] = [{"step": step, "reward/std": 0.0, "baseline/spread": 0.02} for step in range(1, 2 * EDGE)]
    assert set_off(solved, Planned(of_earlier_steps=True)) == []
    assert [alarm.name for alarm in set_off(solved)] == ["spread"]


def test_dynamic_sampling_keeps_groups_that_vary_more_than_all_rewards() -> None:
    kept: list[Record] = [
        {"step": step, "reward/std": 0.18, "baseline/spread": 0.3, "groups/dropped": 96} for step in range(1, 2 * EDGE)
    ]
    assert set_off(kept, Planned(num_prompts=32)) == set_off(kept, Planned()) == []
    for dropped, prompts in ((0, 32), (0, 0), (4, 32)):
        records = [record | {"groups/dropped": dropped} for record in kept]
        assert [alarm.name for alarm in set_off(records, Planned(num_prompts=prompts))] == ["spread"]


def test_old_samples_are_no_mismatch_of_the_engine() -> None:
    """As in a replay of samples that one version generated, or with rollout.overlap = "one_step"."""
    far = records_with("rollout/logprob_abs_diff", lambda step: 1e-3 * step)
    old = [record | {"rollout/staleness_max": 20.0} for record in far]
    (found,) = set_off(old)
    assert found.name == "mismatch" and "generate new samples" in found.text and "vLLM" not in found.text
    slow = records_with("rollout/logprob_abs_diff", lambda step: 1e-3 + 4e-4 * step)
    assert set_off(record | {"rollout/staleness_max": record["step"]} for record in slow) == []


def test_falling_entropy_with_a_flat_reward_is_a_collapse() -> None:
    records = records_with("entropy", lambda step: 0.6 if step < LATER else 0.04)
    assert [alarm.name for alarm in set_off(record | {"reward/mean": 0.3} for record in records)] == ["entropy"]


def test_the_report_has_current_numbers_while_an_alarm_holds() -> None:
    """Afterwards it has those of the first step."""
    watch = AlarmWatch(PLANNED)
    for record in records_with("reward/failures", lambda step: 1):
        watch.check(record)
    assert [(alarm.step, f" {STEPS};" in alarm.text) for alarm in watch.all()] == [(1, True)]
    watch = AlarmWatch(PLANNED)
    for record in records_with("baseline/self_dependence", lambda step: 0.5 if step == 3 else 0.0):
        watch.check(record)
    assert [(alarm.step, "moves by 0.5" in alarm.text) for alarm in watch.all()] == [(3, True)]


def test_memory_does_not_grow_with_the_run() -> None:
    course = Course()
    for value in range(10_000):
        course.add(float(value))
    assert course.early == list(range(EDGE)) and list(course.recent) == list(range(10_000 - EDGE, 10_000))
    assert course.ends == (9.5, 9989.5) and course.risen > 1000
    assert math.isclose(Course([1.0] * EDGE, course.recent, 2 * EDGE).ends[0], 1.0)  # type: ignore[index]


def live(run_dir: Path, said: list[str], past: list[Record] | None = None) -> LiveAlarms:
    return LiveAlarms(run_dir, PLANNED, said.append, past or [])


def test_a_run_reports_an_alarm_once_and_keeps_it(tmp_path: Path) -> None:
    said: list[str] = []
    alarms = live(tmp_path, said)
    records = records_with(*CASES["truncation"][:2])
    for record in records:
        alarms.check(record)
    (found,) = set_off(records)
    assert said == [f"alarm at step {found.step}: {found.text}"]
    kept = [json.loads(line) for line in (tmp_path / ALARMS_FILE).read_text().splitlines()]
    assert kept == [{"name": "truncation", "step": found.step, "text": found.text, "cause": ""}]


@pytest.mark.parametrize("resumed_at", [100, 150])
def test_a_resumed_run_does_not_repeat_an_alarm(tmp_path: Path, resumed_at: int) -> None:
    """It was raised at step 111: before the checkpoint, or in steps that are repeated after it."""
    said: list[str] = []
    records = records_with(*CASES["truncation"][:2])
    for path in (tmp_path, tmp_path / "other"):
        path.mkdir(exist_ok=True)
        alarms = live(path, said)
        for record in records[:160]:
            alarms.check(record)
        with (path / ALARMS_FILE).open("a") as file:
            file.write('{"name": "entr')  # cut by a kill
        alarms = live(path, said, records[:resumed_at])
        for record in records[resumed_at:]:
            alarms.check(record)
        assert len(said) == 1, said
        said.clear()


def test_alarms_of_steps_that_are_done_again_with_other_settings_are_forgotten(tmp_path: Path) -> None:
    """It was raised at step 111. The run goes on from step 80 with another rate, and is healthy until step 120."""
    said: list[str] = []
    records = records_with(*CASES["truncation"][:2])
    alarms = live(tmp_path, said)
    for record in records[:160]:
        alarms.check(record)
    with (tmp_path / ALARMS_FILE).open("a") as file:
        file.write('{"name": "reward", "step": 150, "text": "it fell", "cause": ""}\n')
    assert len(said) == 1 and not alarms_of(tmp_path, PLANNED, records[:100]), "none of the future"
    assert [alarm.name for alarm in alarms_of(tmp_path, PLANNED, records[:160])] == ["reward", "truncation"]
    alarms = LiveAlarms(tmp_path, PLANNED, said.append, records[:80], changed=True)
    assert (tmp_path / ALARMS_FILE).read_text(), "the run may still be refused"
    alarms.start()
    assert not (tmp_path / ALARMS_FILE).exists()
    for record in records[80:160]:
        alarms.check(record)
    assert len(said) == 2 and len((tmp_path / ALARMS_FILE).read_text().splitlines()) == 1, "raised again"


def test_a_resumed_run_with_other_settings_compares_new_steps_with_them(tmp_path: Path) -> None:
    """The rate was no lower than planned before the resume; it is after step 120."""
    said: list[str] = []
    before = Planned(lr=1e-4, num_prompts=64, group_size=1)
    records = records_with("lr", lambda step: 1e-4 if step <= 80 or step > 120 else 1e-3)
    for record in records[:80]:
        record["groups/mixed_fraction"] = 0.0  # of one response a prompt
    alarms = LiveAlarms(tmp_path, PLANNED, said.append, records[:80], before)
    raised = [(alarm.name, alarm.step) for record in records[80:] for alarm in alarms.check(record)]
    assert raised == [("rate", 160)]  # a quarter of the run
    assert len(said) == 1
    assert alarms_of(tmp_path, PLANNED, records) == [
        Alarm(**json.loads(line)) for line in (tmp_path / ALARMS_FILE).read_text().splitlines()
    ]


def test_a_reward_that_was_repaired_is_forgotten_and_one_that_fails_again_is_said(tmp_path: Path) -> None:
    """The failure came at step 37; the user corrects the function, which is no setting, and resumes from step 30."""
    said: list[str] = []
    broken = records_with("reward/failures", lambda step: 2 * int(step >= 37))
    alarms = live(tmp_path, said)
    for record in broken[:40]:
        alarms.check(record, "KeyError: 'x'" if record["step"] == 37 else "")
    (found,) = alarms_of(tmp_path, PLANNED, broken[:60])
    assert "KeyError: 'x'" in found.text and "48" in found.text, "the number of all steps, the error of the first"
    repaired = records_with("reward/failures", lambda step: 3 * int(step == 50))
    alarms = live(tmp_path, said, repaired[:30])
    alarms.start()
    for record in repaired[30:49]:
        alarms.check(record)
    assert len(said) == 1 and not alarms_of(tmp_path, PLANNED, repaired[:49])
    alarms.check(repaired[49], "ValueError: y")
    assert len(said) == 2 and "ValueError: y" in said[1]


def test_a_resume_with_another_reward_compares_with_no_earlier_step(tmp_path: Path) -> None:
    """The other reward is a fifth of the first one, and no fall."""
    said: list[str] = []
    records = records_with("reward/mean", lambda step: 0.8 if step <= 80 else 0.16)
    table = {"reward.name": "math", "reward.weight": 1.0}
    before, now = planned(table.get), planned((table | {"reward.weight": 0.2}).get)
    assert before != now
    alarms = LiveAlarms(tmp_path, now, said.append, records[:80], before)
    assert not [alarm for record in records[80:] for alarm in alarms.check(record)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_with_the_same_settings_counts_on(tmp_path: Path, kept: bool) -> None:
    """Steps at a low rate add up. An alarm that a later attempt's settings find in the past was never said."""
    said: list[str] = []
    records = records_with("lr", lambda step: 1e-4 if step > 10 else 1e-3)
    if kept:
        alarms = live(tmp_path, said)
        for record in records[:60]:
            alarms.check(record)
    alarms = live(tmp_path, said, records[:60])
    for record in records[60:]:
        alarms.check(record)
    assert [line.partition(":")[0] for line in said] == [f"alarm at step {40 if kept else 61}"]


def test_a_new_run_removes_old_alarms(tmp_path: Path) -> None:
    (tmp_path / ALARMS_FILE).write_text('{"name": "failures", "step": 1, "text": ""}\n')
    said: list[str] = []
    alarms = live(tmp_path, said)
    alarms.start()
    assert not (tmp_path / ALARMS_FILE).exists()
    alarms.check({"step": 1, "reward/failures": 1})
    assert len(said) == 1


def test_the_docs_list_every_alarm() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = docs.partition("| name | goes off when |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(CHECKS)


def test_weights_that_did_not_arrive_are_noticed_within_three_steps() -> None:
    """Also late in a run: the median of the last five steps is 2 nats."""
    (found,) = set_off(records_with("rollout/logprob_abs_diff", lambda step: 1e-6 if step <= LATER else 2.0))
    assert (found.name, found.step) == ("mismatch", LATER + 3)
