"""Rows excluded from training: duplicates, contradictions, overlaps with benchmarks.

Oracle of the overlap: the definition, computed by brute force. Not covered: paraphrases, which shingles cannot find.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.data.training import Benchmarks
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import config, stream, write_rows

DUCKS = "Janet's ducks lay 16 eggs per day and she sells what she does not eat at the market"


def rows(path: Path, *pairs: tuple[object, object]) -> Path:
    return write_rows(path, ({"question": question, "answer": answer} for question, answer in pairs))


def reasons(prompts: PromptStream) -> list[tuple[str, int, str]]:
    return [(Path(skip.source).name, skip.line, skip.reason) for skip in prompts.skipped]


def test_later_rows_of_a_question_are_dropped(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = rows(tmp_path / "a.jsonl", ("1 + 1", 2), (" 1\u00a0+  1\n", 2), ("2+2", 4), ("1 + 2", 3))
    talk = [{"role": "user", "content": "2+2"}]
    second = rows(tmp_path / "b.jsonl", ("x", 1), ("\uff11 + 1", "2"), (talk, " 4"), ("y", 1))
    with caplog.at_level(logging.WARNING):
        prompts = stream(tokenizer, [str(first), str(second)])
    duplicates = [("a.jsonl", 2), ("b.jsonl", 2), ("b.jsonl", 3)]
    assert reasons(prompts) == [(*where, "duplicate") for where in duplicates]
    assert prompts.num_skipped == 3 and len(prompts) == 5
    [line] = caplog.messages
    assert "1 duplicate (line 2)" in line and "2 duplicate (lines 2, 3)" in line
    assert len(stream(tokenizer, [str(first), str(second)], deduplicate=False)) == 8


def test_contradicting_answers_drop_all_rows_of_a_question(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    first = rows(tmp_path / "a.jsonl", ("1+1", 2), ("2+2", 4), ("3+3", 6), ("2+2", 5), ("2+2", 4))
    second = rows(tmp_path / "b.jsonl", ("3+3", 7), ("4+4", 8))
    prompts = stream(tokenizer, [str(first), str(second)])
    dropped = [("a.jsonl", 2), ("a.jsonl", 3)]
    later = [("a.jsonl", 4), ("a.jsonl", 5), ("b.jsonl", 1)]
    assert sorted(reasons(prompts)) == sorted(
        [*((*where, "contradicted by a duplicate") for where in dropped), *((*where, "duplicate") for where in later)]
    )
    assert {prompt.text for prompt in prompts.next_prompts(2)} == {"1+1", "4+4"}


def test_spellings_of_one_answer_do_not_contradict(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    alike = [(r"\frac{1}{2}", r"\dfrac{1}{2}"), ("10,000", "10000"), ("0.50", "0.5"), ("1, 2", "2, 1")]
    unlike = [("0.33", r"\frac{1}{3}"), ("(1,2)", "(2,1)"), ("f(x)", "f'(x)"), ("18", "81")]
    pairs = [(f"row {number}?", answer) for number, pair in enumerate([*alike, *unlike]) for answer in pair]
    prompts = stream(tokenizer, rows(tmp_path / "a.jsonl", *pairs))
    assert {prompt.answer for prompt in prompts.next_prompts(len(prompts))} == {first for first, _ in alike}
    assert [reason for _, _, reason in reasons(prompts)].count("contradicted by a duplicate") == len(unlike)


def test_rows_that_contain_a_benchmark_question_are_dropped(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    test = rows(tmp_path / "test.jsonl", (DUCKS, 1), ("12+34", 46))
    held = rows(tmp_path / "held.jsonl", ("What is two plus two?", 4))
    train = rows(
        tmp_path / "train.jsonl",
        (f"Here is one: {DUCKS.upper()}!", 1),
        ("12*34", 408),
        (" 12+34 ", 46),
        ("Janet's ducks lay 16 eggs per day and she keeps them all for breakfast", 1),
        ("WHAT is two plus two?", 4),
    )
    data = config(train, exclude=str(test), max_prompt_tokens=200)
    prompts = PromptStream(data, tokenizer, seed=0, held_out={"sums": SourceConfig(path=str(held))})
    assert reasons(prompts) == [
        ("train.jsonl", 1, f"overlapping {test}"),
        ("train.jsonl", 3, f"overlapping {test}"),
        ("train.jsonl", 5, "overlapping sums"),
    ]
    assert len(stream(tokenizer, train, exclude=str(test), overlap_threshold=0)) == 5


SYSTEM = " ".join(f"Rule {number}: reason well." for number in range(20))
ENDING = "Please reason step by step, and put your final answer within a box at the very end of your whole response"
ITEMS = ["apples", "pears", "plums", "figs", "nuts", "dates"]


def test_a_script_without_spaces_has_words(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The question of the benchmark with a sentence after it is found in Chinese as in English."""
    question = "小明有十二个苹果他给了小红三个又从商店买回来五个请问小明现在一共有多少个苹果"
    held = rows(tmp_path / "held.jsonl", (question, 14))
    data = rows(tmp_path / "data.jsonl", (f"{question}。请逐步推理。", 14), ("小红有多少个梨子", 3))
    prompts = stream(tokenizer, [str(data)], exclude=[str(held)])
    assert reasons(prompts) == [("data.jsonl", 1, f"overlapping {held}")]


def test_rows_of_one_id_are_told_apart(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """What a run learns of a prompt is kept by its source and id. A row that is there twice is one prompt."""
    table = [("7", "1+1"), ("7", "2+2"), ("7", "1+1"), ("8", "3+3"), ("7", "4+4")]
    path = write_rows(
        tmp_path / "a.jsonl", ({"id": name, "source": "math", "question": text, "answer": "1"} for name, text in table)
    )
    prompts = stream(tokenizer, [str(path)], deduplicate=False)
    found = sorted({(prompt.text, prompt.id) for prompt in prompts.next_prompts(5)})
    assert found == [("1+1", "7"), ("2+2", "7#2"), ("3+3", "8"), ("4+4", "7#3")]


def ask(item: str, count: int) -> str:
    return f"Ann buys {count} {item} on Monday and sells half of all her {item} to Bob {item} for {count} cents each"


@pytest.mark.parametrize("train_form", ["bare", "ending", "system", "both"])
@pytest.mark.parametrize("held_form", ["bare", "ending", "system", "both"])
def test_what_all_questions_share_is_no_overlap(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, train_form: str, held_form: str
) -> None:
    """An instruction at the end of each question, or a system prompt, in one set or in both."""

    def turns(question: str, form: str) -> list[dict[str, str]]:
        text = f"{question}? {ENDING}" if form in ("ending", "both") else f"{question}?"
        system = [{"role": "system", "content": SYSTEM}] if form in ("system", "both") else []
        return [*system, {"role": "user", "content": text}]

    held = [ask(item, 7) for item in ITEMS]
    trained = [held[0], *(f"How many of the {number} {item} are left" for number, item in enumerate(ITEMS)), held[2]]
    test = rows(tmp_path / "test.jsonl", *((turns(question, held_form), 1) for question in held))
    train = rows(tmp_path / "train.jsonl", *((turns(question, train_form), 1) for question in trained))
    prompts = stream(chat_tokenizer, train, exclude=str(test), chat_template=True, max_prompt_tokens=2000)
    assert reasons(prompts) == [("train.jsonl", line, f"overlapping {test}") for line in (1, 8)]


def test_short_questions_in_a_frame_overlap_only_as_texts() -> None:
    benchmarks = Benchmarks(threshold=0.5)
    benchmarks.add("sums", [f"{number}+1 = ? {ENDING}" for number in range(4)])
    assert benchmarks.overlapping(f"2+1 =  ? {ENDING}") == "sums"
    assert benchmarks.overlapping(f"2*1 = ? {ENDING}") == benchmarks.overlapping(f"5+1 = ? {ENDING}") == ""


def test_benchmarks_need_no_answers_but_questions(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    train, lines = rows(tmp_path / "train.jsonl", (DUCKS, 1), ("2+2", 4)), tmp_path / "bench.jsonl"
    lines.write_text(json.dumps({"question": DUCKS}) + "\n" + json.dumps({"problem": "2+2"}) + "\n")
    prompts = stream(tokenizer, train, exclude=str(lines))
    assert reasons(prompts) == [("train.jsonl", 1, f"overlapping {lines}")]
    for text, said in (('{"problem": "2+2", "answer": "4"}\n', "1 no 'question'"), ("", "the data set is empty")):
        lines.write_text(text)
        with pytest.raises(UserError, match=said) as error:
            stream(tokenizer, train, exclude=str(lines))
        assert error.value.where == str(lines)
        assert len(stream(tokenizer, train, exclude=str(lines), overlap_threshold=0)) == 2


def test_an_error_if_no_training_row_remains(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", (DUCKS, 1), (DUCKS, 1), ("2+2", 4))
    with pytest.raises(UserError, match=r"2 overlapping .*train.jsonl \(lines 1, 3\), 1 duplicate") as error:
        stream(tokenizer, train, exclude=str(train))
    assert error.value.where == str(train)
    with pytest.raises(UserError, match="3 duplicate"):
        stream(tokenizer, [str(train), str(train)])


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join), max_size=6),
    st.lists(st.sampled_from(["a", "b", "c", "d", "E", "!", "a_b"]), max_size=12).map(" ".join),
    st.integers(1, 4),
    st.sampled_from([0.01, 0.3, 0.5, 1.0]),
)
def test_overlaps_match_the_definition(held, question, ngram, threshold) -> None:
    def shingles(text: str, frame: frozenset[tuple[str, ...]] = frozenset()) -> set[tuple[str, ...]]:
        words = re.findall(r"[a-z]+", text.lower())
        runs = [range(first, first + ngram) for first in range(len(words) - ngram + 1)]
        framed = {place for run in runs if tuple(words[place] for place in run) in frame for place in run}
        return {tuple(words[place] for place in run) for run in runs if framed.isdisjoint(run)}

    different = [shingles(other) for other in set(held)]
    shared = {run for own in different for run in own if sum(run in other for other in different) > len(different) / 2}
    frame = frozenset(shared if len(different) >= 4 else ())

    def overlaps(other: str) -> bool:
        wanted = shingles(other, frame)
        if not wanted:
            return other.lower() == question.lower()
        return len(wanted & shingles(question)) / len(wanted) >= threshold

    benchmarks = Benchmarks(ngram=ngram, threshold=threshold)
    benchmarks.add("set", held)
    assert benchmarks.overlapping(question) == ("set" if any(overlaps(other) for other in held) else "")
