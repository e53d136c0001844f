"""Records of a source -> rows with a question and an answer; unusable records are skipped and listed."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NamedTuple

from oblr_megatron.data.conventions import Convention, text
from oblr_megatron.data.sources import Record, convention_of, open_source

if TYPE_CHECKING:
    from oblr_megatron.config.data import DataConfig, SourceConfig

MOST_DIGITS = 50
"""A tolerance with a larger exponent is ignored: written out, "1e999999999" has a billion digits."""

NO_TEXT = "is no text and no number but"
KINDS = {list: "a list", dict: "a table", bool: "a truth value"}
FALSE = ("false", "0", "no", "n", "f", "none", "null", "nan")  # texts, as a conversion from CSV leaves them
LOST_BACKSLASH = "a control character in place of a LaTeX command's backslash"
_LOST_BACKSLASH = re.compile(
    r"[\x00-\x08\x0b\x0e-\x1f](?=[A-Za-z])|\x0c(?=[a-z])|\r(?:ight|ho|m|angle|floor|ceil)(?![a-z])"
    r"|\nabla(?![a-z])|(?:\\[A-Za-z]+|[0-9A-Z)}\]|']|(?<![A-Za-z])[a-z]) ?\n(?:eq|mid)(?![a-z]) ?"
    r"(?:-?[0-9]|[\\({]|[A-Za-z](?![A-Za-z]))"  # an operand on both sides: "mid-term" and "eq. (3)" may begin a line
    r"|\t(?:ext(?:bf|it|rm)?(?=\{)|(?:imes|heta|frac|riangle|au|ilde)(?![a-z])|an(?=[({^\\]))"
)

Messages = list[dict[str, str]]  # [{"role": "user", "content": "2+3?"}]
Question = str | Messages


class Skipped(NamedTuple):
    """A skipped row.

    Example: Skipped(source="rows.jsonl", line=12, reason="longer than data.max_prompt_tokens 20", detail="40 tokens")
    """

    source: str  # path, as configured
    line: int  # line or row in the file, counted from 1 as in editors
    reason: str  # rows are grouped by this text
    detail: str = ""
    file: str = ""  # name without suffix; a source may have several files


class Row(NamedTuple):
    """A usable row.

    Example: Row(row=41, id="gsm8k-41", question="2+3?", answer="5", source="gsm8k", tolerance="", file="train")
    """

    row: int  # line in the file, counted from 0
    id: str  # the row's "id" column, else file name and line
    question: Question
    answer: str
    source: str  # the row's "source" column, else the file name, or in training its other name (`distinct_names`)
    tolerance: str  # in the format of types.Prompt.tolerance
    file: str  # name without suffix
    columns: str = ""  # all columns as a JSON object, with data.keep_columns

    def left_out(self, source: str, reason: str, detail: str = "") -> Skipped:
        """The record of this row as skipped; `source` is the configured path."""
        return Skipped(source, self.row + 1, reason, detail, self.file)


class _UnusableError(ValueError):
    """A record cannot be used; the text is the reason to skip it."""


def read_rows(
    source: SourceConfig,
    config: DataConfig,
    skipped: list[Skipped],
    *,
    training: bool = False,
    unanswered: bool = False,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The usable rows in file order; blank lines are ignored.

    Args:
        source: the data set.
        config: fallback column names, after those of the source and its convention.
        skipped: skipped rows are appended here.
        training: skip rows flagged `overlaps_benchmark`, and read the convention's training split.
        unanswered: keep rows without an answer, which is then empty.
        names: other names of files by path, as the source of rows without such a column.

    Raises:
        UserError: the source cannot be read.
    """
    convention = convention_of(source)
    questions = (source.question_column,) if source.question_column else (*convention.questions, config.question_column)
    answers = (source.answer_column,) if source.answer_column else (*convention.answers, config.answer_column)
    for record in open_source(source, training=training):
        default = (names or {}).get(record.path, record.file)
        try:
            row = _row(record, convention, questions, answers, training, default, unanswered)
            if config.keep_columns:
                row = row._replace(columns=_columns(record.value))
        except _UnusableError as reason:
            skipped.append(Skipped(source.path, record.number + 1, str(reason), file=record.file))
        else:
            yield row


def plain_text(question: Question) -> str:
    """The question as one text, with which duplicates are found: another system prompt may ask something else."""
    return question if isinstance(question, str) else "\n".join(message["content"] for message in question)


def asked_text(question: Question) -> str:
    """What users ask, with which overlaps are found: sets share system prompts, or only one of two sets has one."""
    if isinstance(question, str):
        return question
    return "\n".join(message["content"] for message in question if message["role"] == "user")


def normalized(words: str) -> str:
    """NFKC with single spaces: "a\\u00a0 b" -> "a b". Equal results mean equal questions."""
    return " ".join(unicodedata.normalize("NFKC", words).split())


def _row(
    record: Record,
    convention: Convention,
    questions: Iterable[str],
    answers: Iterable[str],
    training: bool,
    source: str,
    unanswered: bool,
) -> Row:
    """The row; `source` is that of a row without such a column."""
    values = record.value
    if isinstance(values, str):
        raise _UnusableError(values)
    question = _question(values, questions, convention)
    answer = next((gold for name in answers if (gold := _gold(values, name, convention))), "")
    if not (answer or unanswered):
        unboxed = [name for name in answers if name in convention.solutions and text(field_of(values, name)).strip()]
        raise _UnusableError(f"no \\boxed in {unboxed[0]!r}") if unboxed else _no_answer(values, answers)
    flag = values.get("overlaps_benchmark")
    if training and flag and str(flag).strip().casefold() not in ("", *FALSE):
        raise _UnusableError("flagged overlaps_benchmark")
    row = Row(
        row=record.number,
        id=text(values.get("id")) or f"{record.file}-{record.number}",
        question=question,
        answer=answer,
        source=text(values.get("source")) or source,
        tolerance=_tolerance(values, convention),
        file=record.file,
    )
    if not _is_unicode([row.id, row.question, row.answer, row.source]):
        raise _UnusableError("half of a surrogate pair")
    if has_lost_backslash(plain_text(row.question)):
        raise _UnusableError(LOST_BACKSLASH)
    return row


def has_lost_backslash(words: str) -> bool:
    r"""Whether a control character stands where a LaTeX command had one backslash too few for JSON or TOML.

    Examples: "\b" + "oxed" is True, "\t" + "imes" is True; "\t" + "Total" is False: tabs and line ends are usual.
    """
    return _LOST_BACKSLASH.search(words) is not None


def _is_unicode(value: object) -> bool:
    r"""Whether UTF-8 can write every text in a value. JSON may contain "\ud800", half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except (UnicodeEncodeError, RecursionError):  # too deep for JSON is too deep for a template
        return False
    return True


def _columns(values: object) -> str:
    """The columns as a JSON object. What JSON does not know becomes text."""
    try:
        return json.dumps(values, default=str, skipkeys=True)
    except RecursionError:
        raise _UnusableError("nested too deep") from None


def _question(values: dict[str, Any], columns: Iterable[str], convention: Convention) -> Question:
    """The first column with text, a number or messages, after the convention's `question` reader."""
    for column in columns:
        value = convention.question(field_of(values, column))
        if text(value).strip():
            return text(value)
        if isinstance(value, list) and value:
            try:
                turns = [_plain_turn(turn) for turn in value]
            except RecursionError:
                raise _UnusableError("nested too deep") from None
            if not _is_conversation(turns):
                raise _UnusableError(f"{column!r} is not a conversation that ends with a user turn")
            return turns
    raise _missing(columns)


def _plain_turn(turn: Any) -> Any:
    """A message with its text parts as one text, and without keys of null: arrow fills gaps with them, also in calls.

    OpenAI's API writes null as the content of a turn that only calls tools.
    """
    if not isinstance(turn, dict):
        return turn
    turn = _without_nulls(turn)
    parts = turn.setdefault("content", "") if turn.get("tool_calls") else turn.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        turn["content"] = "".join(text(part.get("text")) for part in parts)
    return turn


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _is_conversation(value: list[Any]) -> bool:
    turns = [turn for turn in value if isinstance(turn, dict)]
    texts = all(isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str) for turn in turns)
    return len(turns) == len(value) and texts and turns[-1]["role"] == "user" and bool(turns[-1]["content"].strip())


def _missing(columns: Iterable[str]) -> _UnusableError:
    return _UnusableError(f"no {' or '.join(repr(column) for column in dict.fromkeys(columns))}")


def _no_answer(values: dict[str, Any], columns: Iterable[str]) -> _UnusableError:
    """No column has an answer, or one has a value that is none."""
    found = {name: KINDS.get(type(field_of(values, name)), "") for name in columns}
    odd = next(((name, kind) for name, kind in found.items() if kind), None)
    return _UnusableError(f"{odd[0]!r} {NO_TEXT} {odd[1]}") if odd else _missing(columns)


def field_of(values: dict[str, Any], name: str) -> Any:
    """Column `name`; "a.b" is field b of column a, unless a column "a.b" exists."""
    if name in values:
        return values[name]
    first, dot, rest = name.partition(".")
    inner = values.get(first)
    return field_of(inner, rest) if dot and isinstance(inner, dict) else None


def _gold(values: dict[str, Any], column: str, convention: Convention) -> str:
    """The gold answer in a column; empty if there is none."""
    value = field_of(values, column)
    whole, is_solution = text(value), column in convention.solutions
    raw = str(convention.gold(value))
    gold = raw.strip()
    if is_solution and gold == whole.strip():
        return ""
    # White space is read before it is removed: the first character may be what is left of a backslash.
    if has_lost_backslash(raw) or (not is_solution and has_lost_backslash(whole)):
        raise _UnusableError(LOST_BACKSLASH)
    return gold


def _tolerance(values: dict[str, Any], convention: Convention) -> str:
    """The row's tolerance as a plain decimal ("1e-1" -> "0.1"), else the convention's."""
    for column in convention.tolerances:
        written = text(values.get(column)).strip()
        try:
            number = Decimal(written.removesuffix("%")) if written else Decimal(0)
        except InvalidOperation:
            continue
        if number.is_finite() and number > 0 and abs(number.adjusted()) < MOST_DIGITS:
            return f"{number:f}" + "%" * written.endswith("%")
    return convention.tolerance
