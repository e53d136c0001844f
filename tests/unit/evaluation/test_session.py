"""What `eval` refuses before an engine is started, whose files it goes on with, and what it prints.

Not covered: the engine (tests/e2e/test_eval.py).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from oblr_megatron import cli
from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.evaluation.accuracy import Grade, Grades
from oblr_megatron.evaluation.session import _sink, check
from oblr_megatron.evaluation.settings import weights_digest
from oblr_megatron.evaluation.setup import split_overrides
from oblr_megatron.evaluation.summary import SetReport, table
from tests.tiny import make_hf_dir

KEYS = ["reward.name=exact_match", "data.max_prompt_tokens=24", "rollout.max_response_tokens=40"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"t{n}", "answer": "t2"}) + "\n" for n in range(2, 6)))
    return path


def options(model: Path, *data: object, overrides: Sequence[str] = (), **changes: Any) -> Any:
    given = {"config": None, "k": 2, "out": None, "overwrite": False, "json": None} | changes
    return SimpleNamespace(model=model, data=[str(one) for one in data], overrides=[*KEYS, *overrides], **given)


def refusal(*arguments: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(options(*arguments, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sets_go_by_name(model: Path, rows: Path) -> None:
    task = check(options(model, rows, f"other={rows}"))
    assert {name: len(prompts) for name, prompts in task.sets.items()} == {"rows": 4, "other": 4}
    assert (task.k, task.done) == (2, {"rows": [], "other": []})
    assert "two data sets have the same name" in refusal(model, rows, rows)
    assert "no data set" in refusal(model)


def test_what_stands_behind_the_data_may_be_overrides() -> None:
    sets = ["a.jsonl", "aime=b.jsonl", "data=c.jsonl", "v1.5=d.jsonl", "x/evaluate.top_p"]
    keys = ["seed=1", "evaluate.temperature=0.6", "data.template=Q {question}=", "algo.snr.num_folds=1"]
    mixed = [one for pair in zip([*sets, "e.jsonl"], [*keys, "run_dir=r", "num_steps=1"], strict=True) for one in pair]
    assert split_overrides(mixed) == ([*sets, "e.jsonl"], [*keys, "run_dir=r", "num_steps=1"])


def test_a_config_s_own_sets_and_k_are_taken_where_none_are_given(model: Path, rows: Path, tmp_path: Path) -> None:
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
    ("changes", "said"),
    [
        ({"k": -1}, "evaluate.samples_per_prompt = -1"),
        ({"overwrite": True}, r"nothing to overwrite \[--overwrite\]"),
        ({"json": Path("/nowhere/f.json")}, r"cannot be written \[/nowhere/f.json\]"),
        ({"overrides": ["evaluate.max_response_tokens=200"]}, "evaluate.max_response_tokens 200 = 224 exceeds .* 128"),
        ({"overrides": ["rollout.max_response_tokens=200"]}, "rollout.max_response_tokens 200 = 224 exceeds .* 128"),
        ({"overrides": ["reward.name=nothing"]}, "nothing"),
        ({"out": Path(__file__).parent}, "holds something else than an evaluation"),
        ({"out": Path("/proc/evaluations")}, "cannot be written"),
    ],
)
def test_mistakes_are_found_before_anything_starts(model: Path, rows: Path, changes: Any, said: str) -> None:
    assert re.search(said, refusal(model, rows, **changes))


def test_the_command_says_so_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--model", str(model), "--data", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_only_the_same_evaluation_goes_on_in_its_directory(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    check(options(model, rows, out=out))
    check(options(model, rows, out=out))
    check(options(model, f"more={rows}", out=out))  # further sets are welcome
    held = json.loads((out / "evaluation.json").read_text())
    assert [*held["sets"]] == ["rows", "more"]
    for changes, name in (
        ({"k": 3}, "sampling.k 2, this one has 3"),
        ({"overrides": ["seed=1"]}, "seed 0, this one has 1"),
        ({"overrides": ["evaluate.num_prompts=2"]}, "rows.prompts 4, this one has 2"),
        ({"overrides": ["data.template=Q {question}"]}, "rows.digest"),
        ({"overrides": ["reward.name=math"]}, "reward.name"),
        ({"overrides": ["group_size=4"]}, "block_responses"),
    ):
        said = refusal(model, rows, out=out, **changes)
        assert f"holds an evaluation with {name}" in said and "--overwrite" in said


def test_overwrite_removes_what_was_there(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    check(options(model, rows, f"more={rows}", out=out))
    for name in ("rows.jsonl", "more.jsonl", "figures.json"):
        (out / name).write_text("old")
    check(options(model, rows, out=out, k=3, overwrite=True))
    assert [path.name for path in out.iterdir()] == ["evaluation.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"settings": 1, "sets": {}}', '{"settings": {}}'])
def test_a_damaged_side_file_is_named(model: Path, rows: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluation.json").write_text(content)
    assert "not what an evaluation writes" in refusal(model, rows, out=tmp_path / "out")


def test_checkpoints_of_the_same_shapes_are_told_apart(model: Path, tmp_path: Path) -> None:
    """Every weight a little further along, as after a training step; and the same files elsewhere are the same."""
    before = weights_digest(check_hf_dir(model))
    copy = make_hf_dir(tmp_path / "copy")
    assert weights_digest(check_hf_dir(copy)) == before
    file = copy / "model.safetensors"
    save_file({name: 1.0001 * value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    assert weights_digest(check_hf_dir(copy)) != before


def test_a_disk_that_takes_no_more_ends_the_command_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").mkdir()
    with pytest.raises(RunError, match="Is a directory; the same command goes on"):
        _sink(tmp_path, "s", lambda count: None)([])


def grade(answer: str, verdict: float) -> Grade:
    return Grade(verdict, answer, tokens=5, truncated=False)


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


def test_a_greedy_evaluation_has_no_samples_to_show() -> None:
    report = SetReport.of("set", Grades([grade("4", 1.0)], [], 0))
    assert report.line() == "set: accuracy 100.0% (20.7% to 100.0%) greedy on 1 prompts"
    assert len(table([report]).columns) == 5
