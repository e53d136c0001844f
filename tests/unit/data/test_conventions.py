r"""Conventions: one row of each benchmark in its published format, and the copy of the table in docs/data.md.

Not covered: whether the hub data sets still have these columns. The rows below follow their dataset cards.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from oblr_megatron.config.data import CONVENTION_NAMES, DataConfig, EvaluateConfig
from oblr_megatron.data.conventions import CONVENTIONS, Convention, text
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.sources import convention_of
from tests.unit.data.conftest import config, write_rows

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $1+1$?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
PUBLISHED = {
    "gsm8k": {"question": "What is 1+1?", "answer": "It is <<1+1=2>>2.\n#### 1,234"},
    "math": {"problem": "What is 1+1?", "solution": r"Not $\boxed{3}$ but $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
    "math500": {"problem": "What is 1+1?", "solution": r"$\boxed{3}$", "answer": r"\$32,\!348", "unique_id": "test/1"},
    "aime": {"Question": "What is 1+1?", "Answer": "033"},
    "aime24": {"id": 60, "problem": "What is 1+1?", "solution": r"\boxed{33}", "answer": "033", "year": "2024"},
    "aime25": {"problem": "What is 1+1?", "answer": "0", "id": "0"},
    "amc": {"problem": "What is 1+1?", "answer": 142.0},
    "amc23": {"id": 0, "question": "What is 1+1?", "answer": "27.0", "url": "https://"},
    "olympiadbench": {"question": "What is 1+1?", "final_answer": ["$69$,$84$"], "error": None, "unit": None},
    "minerva": {"question": "What is 1+1?", "answer": "6.02e23"},
    "dapo": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
}
GOLD = {
    "gsm8k": "1234",
    "math": r"\frac{1}{2}",
    "math500": r"\$32,\!348",
    "aime": "33",
    "aime24": "33",
    "aime25": "0",
    "amc": "142",
    "amc23": "27",
    "olympiadbench": "69,84",
    "minerva": "6.02e23",
    "dapo": "34",
}


def test_the_config_lists_all_conventions() -> None:
    assert set(CONVENTION_NAMES) == set(CONVENTIONS) and len(CONVENTION_NAMES) == len(CONVENTIONS)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_rows_as_published(name: str, tmp_path: Path, tokenizer) -> None:
    path = write_rows(tmp_path / "published.jsonl", [PUBLISHED[name]])
    data = config({"path": str(path), "convention": name}, template="Q: {question}")
    [prompt] = read_prompts(data.train[0], data, tokenizer)
    assert prompt.answer == GOLD[name]
    assert prompt.text == ("Q: What is $1+1$?" if name == "dapo" else "Q: What is 1+1?")
    assert prompt.tolerance == ("1%" if name == "minerva" else "")


@pytest.mark.parametrize("name", CONVENTIONS)
def test_gold_readers_do_not_change_a_bare_answer(name: str) -> None:
    gold = CONVENTIONS[name].gold
    assert gold(GOLD[name]) == GOLD[name] == gold(gold(GOLD[name]))
    for answer in ("-3", "0", "x"):
        assert gold(answer) == answer


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("gsm8k", "#### $70,000", "70000"), ("gsm8k", "a #### 1\n#### -5 ", "-5"), ("aime24", 33, "33"),
        ("aime24", "000", "0"), ("amc23", "3.50", "3.50"), ("amc23", -2.0, "-2"),
        ("olympiadbench", ["$1$", "$x=2$"], "1, x=2"), ("olympiadbench", r"costs \$5", r"costs \$5"),
        ("math", r"\boxed{\boxed{1}", "1"), ("math", r"Not $\boxed 3$. Thus $x=\boxed 2$. Done.", "2"),
        ("math", r"\[x = \boxed \frac{1}{2} \] as \boxedly said", r"\frac{1}{2}"),
        ("math", r"so $\fbox{7}$, not 8", "7"), ("math", r"$\boxed{3}$ and \fbox{a note}", "3"),
        ("math", r"cut: $\boxed {5$", r"cut: $\boxed {5$"), ("dapo", None, ""), ("olympiadbench", None, ""),
        ("math", ["1"], ""),
    ],
)  # fmt: skip
def test_gold_answers(name: str, value: object, answer: str) -> None:
    assert CONVENTIONS[name].gold(value) == answer


@pytest.mark.parametrize(
    ("written", "tolerance"),
    [("1e-1", "0.1"), (0.5, "0.5"), ("2%", "2%"), ("0", ""), (None, ""), ("about", ""), ("NaN", ""), ("-1", "")],
)
def test_tolerances_of_rows(written: object, tolerance: str, tmp_path: Path, tokenizer) -> None:
    rows = [PUBLISHED["olympiadbench"] | {"error": written}, PUBLISHED["olympiadbench"] | {"tolerance": written}]
    data = config({"path": str(write_rows(tmp_path / "a.jsonl", rows)), "convention": "olympiadbench"})
    assert [prompt.tolerance for prompt in read_prompts(data.train[0], data, tokenizer)] == [tolerance] * 2


def test_only_dapos_instruction_is_removed(tmp_path: Path, chat_tokenizer) -> None:
    talk = [{"role": "user", "content": "Solve: 1+1"}]
    rows = [{"prompt": talk, "answer": 2}, {"prompt": "1+1", "answer": 2}, {"prompt": DAPO, "solution": "2"}]
    data = config({"path": str(write_rows(tmp_path / "a.jsonl", rows)), "convention": "dapo"}, chat_template=True)
    texts = [prompt.text for prompt in read_prompts(data.train[0], data, chat_tokenizer)]
    assert texts == ["<u>Solve: 1+1<a>", "<u>1+1<a>", "<u>What is $1+1$?<a>"]


def test_columns_of_the_source_come_first_and_those_of_the_data_section_last(tmp_path: Path, tokenizer) -> None:
    row = {"problem": "p", "question": "q", "answer": "a 1", "solution": r"\boxed{s}", "text": "t", "gold": "#### 5"}
    path = str(write_rows(tmp_path / "a.jsonl", [row]))
    for source, pair in (
        ({"convention": "math"}, ("p", "a 1")),
        ({"convention": "math", "answer_column": "solution"}, ("p", "s")),
        ({"question_column": "text", "answer_column": "gold"}, ("t", "#### 5")),
        ({"question_column": "text", "answer_column": "gold", "convention": "gsm8k"}, ("t", "5")),
    ):
        data = config({"path": path, **source})
        [prompt] = read_prompts(data.train[0], data, tokenizer)
        assert (prompt.text, prompt.answer) == pair
    path = str(write_rows(tmp_path / "b.jsonl", [{"text": "t", "gold": "0"}]))
    data = config({"path": path, "convention": "aime"}, question_column="text", answer_column="gold")
    assert read_prompts(data.train[0], data, tokenizer)[0].answer == "0"


def test_a_solution_without_a_box_is_skipped(tmp_path: Path, tokenizer) -> None:
    solutions = ["Thus it is 2.", r"Thus it is $\boxed 2$.", "", None]
    rows = [{"problem": f"1+{number}?", "solution": solution} for number, solution in enumerate(solutions)]
    rows.append({"problem": "1+4?", "solution": "Thus it is 5.", "answer": "5"})
    data = config({"path": str(write_rows(tmp_path / "a.jsonl", rows)), "convention": "math"})
    prompts = read_prompts(data.train[0], data, tokenizer)
    assert [prompt.answer for prompt in prompts] == ["2", "5"]
    missing = "no 'answer' or 'solution'"
    assert [(skip.line, skip.reason) for skip in prompts.skipped] == [
        (1, "no \\boxed in 'solution'"), (3, missing), (4, missing)
    ]  # fmt: skip


def as_row(name: str, convention: Convention) -> str:
    """The row of a convention in docs/data.md."""
    splits = ", ".join(dict.fromkeys(filter(None, (convention.training_split, convention.split))))
    where = " ".join(filter(None, (f"`{convention.hub}`" if convention.hub else "none", convention.subset, splits)))
    columns = ", ".join(f"`{column}`" for column in convention.questions)
    answers = ", ".join(f"`{column}`" for column in convention.answers)
    reads = (convention.gold.__doc__ or "").partition(": ")[2].partition(". ")[0].rstrip(".")
    gold = "as it is" if convention.gold is text else reads
    own = f"`{convention.tolerances[0]}`" if convention.tolerances else "none"
    cells = [f"`{name}`", convention.title, where, columns, answers, gold, convention.tolerance or own]
    return " | ".join(["", *cells, ""]).strip()


def test_docs_table_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [row for row in (as_row(*item) for item in CONVENTIONS.items()) if row not in page]
    assert not missing, "docs/data.md lacks these lines\n" + "\n".join(missing)


def test_docs_examples_are_valid_configurations() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    sources = []
    for block in blocks:
        table = tomllib.loads(block)
        sources.append(DataConfig.model_validate(table["data"]).train)
        EvaluateConfig.model_validate(table.get("evaluate", {}))
    assert [len(own) for own in sources] == [1, 2, 2]
    assert convention_of(sources[1][0]) is CONVENTIONS["dapo"]
