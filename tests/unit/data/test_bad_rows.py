r"""Rows that must cost themselves alone: lone surrogates, numbers that are none, huge texts, huge tolerances.

Not covered: the tokenizers of published models, and the memory that a huge row would have needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.rows import Skipped, read_rows
from oblr_megatron.data.template import LongRows
from oblr_megatron.data.training import training_sets
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import config, stream, write_rows

HALF = "\ud83d"  # of a smiley
GOOD = {"question": "1+1=", "answer": "2"}
TALK = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]


def skipped_of(prompts: Any) -> list[tuple[int, str]]:
    return [(skip.line, skip.reason) for skip in prompts.skipped]


@pytest.mark.parametrize("column", ["question", "answer", "id", "source"])
def test_half_of_a_surrogate_pair(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, column: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD | {column: f"3+3{HALF}"}, GOOD, GOOD | {"unused": HALF}])
    other = write_rows(
        tmp_path / "other.jsonl", [{"question": "7+7=", "answer": 14, column: f"8+8{HALF}"}, {"question": "9+9="}]
    )
    for prompts in (stream(tokenizer, path, deduplicate=False), stream(tokenizer, path, exclude=other)):
        assert skipped_of(prompts)[0] == (1, "half of a surrogate pair")
    data = config(path)
    assert skipped_of(read_prompts(data.train[0], data, tokenizer)) == [(1, "half of a surrogate pair")]


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": HALF}, {"role": f"user{HALF}", "content": "1"}, {"name": [{"a": HALF}]}]
)
def test_half_of_a_surrogate_pair_in_a_conversation(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, message: dict[str, Any]
) -> None:
    talk = [{"role": "user", "content": "1+1="} | message, TALK[-1]]
    path = write_rows(tmp_path / "rows.jsonl", [{"question": talk, "answer": 2}, {"question": TALK, "answer": 2}])
    assert skipped_of(stream(chat_tokenizer, path, chat_template=True)) == [(1, "half of a surrogate pair")]


def test_a_whole_pair_is_one_character(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "\\ud83d\\ude00", "answer": "2"}\n')
    assert stream(tokenizer, path).next_prompts(1)[0].text == "\U0001f600"


def test_a_template_that_fails_on_a_rows_values(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", "{{ 'a' + messages[0].name }}" + chat_tokenizer.chat_template)
    rows = [{"question": [TALK[-1] | {"name": name}], "answer": 2} for name in (5, "b")]
    prompts = stream(chat_tokenizer, write_rows(tmp_path / "rows.jsonl", rows), chat_template=True, deduplicate=False)
    assert skipped_of(prompts) == [(1, "refused by the chat template")]


def test_numbers_that_are_none(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "1+1=", "answer": NaN}\n{"question": -Infinity, "answer": 2}\n'
        + f'{{"question": "2+2=", "answer": {"9" * 5000}}}\n'
        + json.dumps(GOOD)
    )
    assert skipped_of(stream(tokenizer, path)) == [(1, "no 'answer'"), (2, "no 'question'"), (3, "not JSON")]


def test_a_tolerance_of_a_billion_digits_is_ignored(tmp_path: Path) -> None:
    rows = [GOOD | {"error": value} for value in ("1e999999999", "1e-999999999", "0.1", "5%")]
    source = SourceConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows)), convention="olympiadbench")
    skipped: list[Skipped] = []
    assert [row.tolerance for row in read_rows(source, config(), skipped)] == ["", "", "0.1", "5%"]
    assert not skipped


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('[{"question": "1+1=", "answer": 2}]', "one JSON object per line"),
        ('[\n  {\n    "question": "1+1=",\n    "answer": 2\n  }\n]', "one JSON object per line"),
        ('{"question": "1+1= and more", "answer": 2}', "data.max_prompt_tokens"),
        ('{"problem": "1+1=", "answer": 2}', "question and answer columns"),
        ('{"question": "Guess.", "answer": %d}', "data.deduplicate = false"),
    ],
)
def test_the_fix_is_that_of_the_most_frequent_reason(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, line: str, fix: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n".replace("%d", str(number)) for number in range(3)))
    with pytest.raises(UserError) as caught:
        stream(tokenizer, path, max_prompt_tokens=6, deduplicate="%d" in line)
    assert fix in caught.value.fix


def byte_level(normalizer: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as Qwen3's: every byte has a token, and long runs of blanks have one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.normalizer = normalizer or normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    core.train_from_iterator(["the sum of the numbers is" + " " * 16] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def words() -> PreTrainedTokenizerFast:
    """One token a word, blanks dropped: no text is long by its characters alone."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def characters() -> PreTrainedTokenizerFast:
    """One token a character; unknown ones in a row are one token."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, " ": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[ab ]"), "isolated")
    core.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def unsplit() -> PreTrainedTokenizerFast:
    """A BPE without words, so that one merge may reach across the whole text."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "abab": 4, " ": 5}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], unk_token="<unk>", fuse_unk=True))
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZERS = {"bytes": byte_level(), "words": words(), "characters": characters(), "unsplit": unsplit()}
PIECES = st.sampled_from(
    ["a", "b", "ab", " ", "\n", "e\u0301", "\ufdfa", "\U0001f600", "<|end|>", "1", "\u0301", "the "]
)


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"1+1=": 0}, unk_token="<unk>"))  # the unknown token itself is unknown
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rows = [GOOD, GOOD | {"question": "2+2="}, GOOD | {"question": "3+3= " * 500}]
    prompts = stream(PreTrainedTokenizerFast(tokenizer_object=core), write_rows(tmp_path / "rows.jsonl", rows))
    assert skipped_of(prompts) == [(2, "refused by the tokenizer"), (3, "refused by the tokenizer")]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=st.lists(st.tuples(PIECES, st.integers(1, 400)), min_size=1, max_size=6), most=st.integers(1, 12))
def test_a_prompt_that_fits_is_never_dropped(name: str, parts: list[tuple[str, int]], most: int) -> None:
    tokenizer = TOKENIZERS[name]
    text = "".join(piece * count for piece, count in parts)
    if LongRows(config(max_prompt_tokens=most), tokenizer).exceeds(text):
        assert len(tokenizer(text)["input_ids"]) > most


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("piece", ["a ", "the sum of ", "ab", "\U0001f600", " "])
def test_a_huge_text_is_recognized_by_its_beginning(name: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where the text may fit whatever its length: blanks that are dropped, unknown characters in one token."""
    tokenizer, huge = TOKENIZERS[name], piece * 200_000
    seen: list[int] = []
    honest = PreTrainedTokenizerFast.__call__

    def counted(self: Any, text: Any, **options: Any) -> Any:
        seen.append(len(text))
        return honest(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    found = LongRows(config(max_prompt_tokens=8), tokenizer).exceeds(huge)
    fits = len(honest(tokenizer, huge[: 2000 * len(piece)])["input_ids"]) <= 8
    assert found != fits
    if found:
        assert max(seen) < len(huge) / 20


@pytest.mark.parametrize("chat", [False, True])
def test_a_huge_row_is_never_tokenized_whole(
    tokenizer: PreTrainedTokenizerFast,
    chat_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chat: bool,
) -> None:
    huge = {"question": "12 + 34 " * 50_000, "answer": "46"}
    path = write_rows(
        tmp_path / "rows.jsonl", [GOOD, huge, huge | {"question": [{"role": "user", "content": huge["question"]}]}]
    )
    longest = 0
    honest = PreTrainedTokenizerFast.__call__

    def counted(self: Any, text: Any, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, *map(len, [text] if isinstance(text, str) else text))
        return honest(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    data = config(path, max_prompt_tokens=16, chat_template=chat, exclude=path, overlap_threshold=0.5)
    own = chat_tokenizer if chat else tokenizer
    expected = [(2, "longer than data.max_prompt_tokens 16"), (3, "longer than data.max_prompt_tokens 16")]
    [trained] = training_sets(data.model_copy(update={"exclude": ()}), own, {})
    assert skipped_of(trained) == expected and len(trained) == 1
    evaluated = read_prompts(data.train[0], data, own)
    assert skipped_of(evaluated) == expected and evaluated.skipped[0].detail.endswith("characters")
    with pytest.raises(UserError, match="overlapping"):
        training_sets(data, own, {})
    assert longest < 10_000


def test_many_long_rows_go_to_the_tokenizer_in_parts(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oblr_megatron.data.prompt_set.TOKENIZE_CHARACTERS", 100)
    rows = [{"question": f"{'1+' * 20}{number}", "answer": number} for number in range(10)]
    prompts = stream(tokenizer, write_rows(tmp_path / "rows.jsonl", rows), shuffle=False)
    assert [prompt.answer for prompt in prompts.next_prompts(10)] == [str(number) for number in range(10)]


@pytest.mark.parametrize("start", ["[\n", "\ufeff[\n", "\n  [  \r\n", "[", "\n ["])
def test_an_array_with_one_object_a_line_is_refused(
    start: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Only its last row has no comma behind it, so a run would train on that row."""
    path = tmp_path / "rows.json"
    path.write_text(start + ",\n".join(json.dumps(GOOD) for _ in range(3)) + "\n]\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        stream(tokenizer, path)
    assert caught.value.where == str(path) and "one JSON object per line" in caught.value.fix
    path.write_text(json.dumps(GOOD) + "\n[\n")
    assert skipped_of(stream(tokenizer, path)) == [(2, "not JSON")]
