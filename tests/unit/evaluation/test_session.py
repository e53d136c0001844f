"""`eval` without an engine: errors before the start, continuing in OUT, printed output.

Not covered: the engine (tests/e2e/test_eval.py).
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from oblr_megatron import cli
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.session import _sink, check, run
from oblr_megatron.evaluation.setup import split_overrides
from oblr_megatron.evaluation.summary import SetReport, table
from oblr_megatron.runtime.run_lock import run_lock
from tests.adapters import Adapter, write
from tests.tiny import make_hf_dir

ENVIRONMENT = "tests.e2e.environments:turns"
KEYS = ["reward.name=exact_match", "data.max_prompt_tokens=24", "rollout.max_response_tokens=40"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("eval") / "model", head_dim=32)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"t{n}", "answer": "t2"}) + "\n" for n in range(2, 6)))
    return path


def options(model: Path, *data: object, overrides: Sequence[str] = (), **changes: Any) -> Any:
    given = {"config": None, "adapter": None, "k": 2, "out": None, "json": None} | changes
    return SimpleNamespace(model=model, data=[str(one) for one in data], overrides=[*KEYS, *overrides], **given)


def refusal(*arguments: Any, **changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check(options(*arguments, **changes))
    assert "\n" not in str(caught.value)
    return caught.value


def test_golds_that_no_response_equals_are_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their accuracy is 0 whatever the model is, e.g. of whole solutions in place of answers."""
    rows = [{"question": "t1", "answer": f"t3 t4 #### t{n}"} for n in range(2, 6)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    check(options(model, tmp_path / "own.jsonl", overrides=["reward.name=math:gsm8k"]))
    (line,) = caplog.messages
    assert line.startswith("own: 4 of 4 golds that no response equals; line 1 is ")


def test_sets_are_named(model: Path, rows: Path) -> None:
    task = check(options(model, rows, f"other={rows}"))
    assert {name: len(prompts) for name, prompts in task.sets.items()} == {"rows": 4, "other": 4}
    assert task.k == 2
    assert "same name" in refusal(model, rows, rows).what
    assert refusal(model).where == "--data"


def test_overrides_after_data_are_separated_from_the_sets() -> None:
    sets = ["a.jsonl", "aime=b.jsonl", "data=c.jsonl", "v1.5=d.jsonl", "x/evaluate.top_p"]
    keys = ["seed=1", "evaluate.temperature=0.6", "data.template=Q {question}=", "algo.snr.num_folds=1"]
    mixed = [one for pair in zip([*sets, "e.jsonl"], [*keys, "run_dir=r", "num_steps=1"], strict=True) for one in pair]
    assert split_overrides(["a.jsonl", "seed = 1"]) == (["a.jsonl"], ["seed = 1"])
    assert split_overrides(mixed) == ([*sets, "e.jsonl"], [*keys, "run_dir=r", "num_steps=1"])
    with pytest.raises(UserError, match=r"did you mean reward\.name"):
        split_overrides(["a.jsonl", "rewrd.name=exact_match"])


def test_default_sets_and_k_come_from_the_config(model: Path, rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    settings = f'data = {{ held = "{rows}" }}\nsamples_per_prompt = 3\nnum_prompts = 2'
    head = 'run_dir = "r"\nnum_prompts = 4\n[model]\npath = "elsewhere"\n[data]\ntrain = "nowhere.jsonl"\n'
    parallel = "[parallel]\ncontext_parallel_size = 2\n[rollout]\nservers = ['http://h:1']\n"
    run.write_text(f"{head}{parallel}[evaluate]\n{settings}\n")
    task = check(options(model, config=run, k=None))
    assert {name: len(prompts) for name, prompts in task.sets.items()} == {"held": 2} and task.k == 3
    assert task.config.model.path == model
    assert (task.config.parallel.context_parallel_size, task.config.rollout.servers) == (1, ())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"k": -1}, "evaluate.samples_per_prompt = -1"),
        ({"adapter": Path("/nowhere")}, r"\[/nowhere\]"),
        ({"json": Path("/nowhere/f.json")}, r"\[/nowhere/f.json\]"),
        ({"overrides": ["evaluate.max_response_tokens=200"]}, "evaluate.max_response_tokens 200 = 224 exceeds .* 128"),
        ({"overrides": ["rollout.max_response_tokens=200"]}, "rollout.max_response_tokens 200 = 224 exceeds .* 128"),
        ({"overrides": ["reward.name=nothing"]}, "nothing"),
        ({"out": Path(__file__).parent}, rf"\[{Path(__file__).parent}\]"),
        ({"out": Path("/proc/evaluations")}, r"\[/proc/evaluations\]"),
    ],
)
def test_errors_are_found_before_an_engine_starts(model: Path, rows: Path, changes: Any, named: str) -> None:
    assert re.search(named, str(refusal(model, rows, **changes)))


def test_an_adapter_of_a_rank_that_no_slot_has_is_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    write(Adapter(model, 513, ("q_proj",), seed=1), tmp_path / "adapter", alpha=1.0)
    assert "ranks up to 512, not 513" in str(refusal(model, rows, adapter=tmp_path / "adapter"))


def test_the_command_prints_an_error_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--model", str(model), "--data", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_out_is_a_new_directory(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "more" / "out"
    assert check(options(model, rows, out=out)).out == out and out.is_dir()
    task = check(options(model, rows, out=out))
    with run_lock(out), pytest.raises(UserError, match=f"process {os.getpid()}"):
        run(task)
    (out / "rows.jsonl").write_text("old")
    assert "holds something" in refusal(model, rows, out=out).what
    assert "cannot write" in refusal(model, rows, out=out / "rows.jsonl").what


def test_a_write_error_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").mkdir()
    with pytest.raises(RunError, match="Is a directory"):
        _sink(tmp_path, "s", lambda count: None)(0, [])


def grade(answer: str, score: float) -> Grade:
    return Grade(score, answer, tokens=5, truncated=False)


def test_the_line_and_the_table() -> None:
    right, wrong = grade("4", 1.0), grade("5", 0.0)
    report = SetReport.of("set", Grades([right, wrong], [right, right, wrong, grade("6", 0.0)], 2))
    assert report.line() == (
        "set: accuracy 50.0% (9.5% to 90.5%) greedy, mean@2 50.0%, pass@2 50.0%, maj@2 50.0% on 2 prompts"
    )
    silent = SetReport.of("silent", Grades([right], [Grade(1.0, None, 5, False, reads_answers=False)] * 2, 2))
    assert "maj" not in silent.line()
    console = Console(width=100, file=io.StringIO())
    console.print(table([report, silent]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in shown for name in ("prompts", "accuracy", "mean@2", "pass@2", "maj@2", "truncated", "tokens"))
    assert "9.5–90.5" in shown and " – " in shown.splitlines()[-3]  # noqa: RUF001


def test_unscored_responses_are_shown_if_there_are_any() -> None:
    right, lost = grade("4", 1.0), Grade(0.0, None, tokens=5, truncated=False, scored=False)
    whole, partial = (SetReport.of("set", Grades([right, other], [], 0)) for other in (right, lost))
    assert partial.line().endswith(" on 2 prompts; 1 responses unscored") and "unscored" not in whole.line()
    assert partial.record()["unscored"] == 1 and "unscored" not in whole.record()
    assert [len(table(reports).columns) for reports in ([whole], [whole, partial])] == [5, 6]


def test_the_line_and_the_table_without_samples() -> None:
    report = SetReport.of("set", Grades([grade("4", 1.0)], [], 0))
    assert report.line() == "set: accuracy 100.0% (20.7% to 100.0%) greedy on 1 prompts"
    assert len(table([report]).columns) == 5
