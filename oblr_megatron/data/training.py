"""The training sources without duplicates, contradicting answers and benchmark questions.

Two questions are duplicates if they are equal after NFKC and white-space normalization. Their answers contradict each
other if they differ after it and the verifier calls them different without computer algebra. A shingle is a run of n
lower-cased words. A training question overlaps a benchmark question if it contains at least a given share of its
shingles. A Chinese, Japanese or Korean character is a word. The frame of a benchmark, which most of its questions
share, is left out of them. A question with no n words in a row outside of the frame has no shingles. It overlaps only
an equal text, because "12+34" and "12*34" have the same words. Both tests are exact. Overlaps are found in the users'
turns of a conversation, duplicates in all turns.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from oblr_megatron.data.prompt_set import PromptSet, warn_of, without_rows
from oblr_megatron.data.rows import Row, Skipped, asked_text, normalized, plain_text, read_rows
from oblr_megatron.data.sources import distinct_names
from oblr_megatron.data.template import LongRows
from oblr_megatron.rewards.math import settle
from oblr_megatron.rewards.verifier.extract import MAX_ANSWER_CHARS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig

MIN_FRAMED = 4  # different questions of a benchmark, at least, to tell a frame from what they ask
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Chinese, Japanese, Korean
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")  # finds the same words in "A_{1}" and "A_1"

Shingle = tuple[str, ...]


def training_sets(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, held_out: Mapping[str, SourceConfig]
) -> list[PromptSet]:
    """The usable rows of each source of config.train. Logs one warning about the skipped rows.

    `held_out` are benchmarks to exclude from training, in addition to config.exclude.

    Raises:
        UserError: a source cannot be read or has no usable row.
    """
    skipped: list[list[Skipped]] = [[] for _ in config.train]

    def without(reason_of: Callable[[Row], str], rows: Iterable[Iterable[Row]]) -> list[Iterator[Row]]:
        return [
            _without(reason_of, own, source.path, left_out)
            for own, source, left_out in zip(rows, config.train, skipped, strict=True)
        ]

    long_rows = LongRows(config, tokenizer)
    stored = (
        read_rows(source, config, left_out, training=True, names=names)
        for source, left_out, names in zip(config.train, skipped, distinct_names(config.train), strict=True)
    )
    rows = without(long_rows.exceeding, stored)  # first, because huge texts need minutes to compare
    if config.deduplicate:
        duplicates = Duplicates()
        first = [list(own) for own in without(duplicates.repeated, rows)]  # the last row may contradict the first one
        rows = without(duplicates.contradicted, first)
    benchmarks, unread = _benchmarks(config, held_out, long_rows)

    def overlap(row: Row) -> str:
        name = benchmarks.overlapping(asked_text(row.question))
        return f"overlapping {name}" if name else ""

    named: dict[str, dict[bytes, str]] = {}
    sets = [
        PromptSet(source.path, _distinct(own, named), left_out, config, tokenizer)
        for source, own, left_out in zip(config.train, without(overlap, rows), skipped, strict=True)
    ]
    warn_of([*((one.path, one.skipped) for one in sets), *unread.items()])
    return sets


def _benchmarks(
    config: DataConfig, held_out: Mapping[str, SourceConfig], long_rows: LongRows
) -> tuple[Benchmarks, dict[str, list[Skipped]]]:
    """The questions of config.exclude and of the held-out sets, and rows of the former without one, by path.

    Empty if overlaps are allowed. A question needs no answer. One that is far longer than any prompt is left out,
    because no training row contains it.

    Raises:
        UserError: a set of config.exclude cannot be read or has no question. (`PromptSet` refuses such a held-out set.)
    """
    benchmarks, unread = Benchmarks(threshold=config.overlap_threshold), dict[str, list[Skipped]]()
    if config.overlap_threshold > 0:
        for name, source in [*((source.path, source) for source in config.exclude), *held_out.items()]:
            left_out: list[Skipped] = []
            rows = read_rows(source, config, left_out, unanswered=True)
            questions = [None if long_rows.exceeding(row) else asked_text(row.question) for row in rows]
            if source in config.exclude:
                if not questions:
                    raise without_rows(name, left_out)
                unread[name] = left_out
            benchmarks.add(name, (each for each in questions if each is not None), whole=bool(source.gym_task))
    return benchmarks, unread


def _without(reason_of: Callable[[Row], str], rows: Iterable[Row], path: str, skipped: list[Skipped]) -> Iterator[Row]:
    """The rows with an empty `reason_of`; the others are appended to `skipped` with their reason."""
    for row in rows:
        if reason := reason_of(row):
            skipped.append(row.left_out(path, reason))
        else:
            yield row


def _distinct(rows: Iterable[Row], named: dict[str, dict[bytes, str]]) -> Iterator[Row]:
    """The rows with an id of its own for each question of a source: what is known of a prompt is kept by it.

    `named` holds the ids so far, by source and id and then by question. A second question has the id "7#2".
    """
    for row in rows:
        ids = named.setdefault(f"{row.source}/{row.id}", {})
        own = ids.setdefault(_digest(row), f"{row.id}#{len(ids) + 1}" if ids else row.id)
        yield row if own == row.id else row._replace(id=own)


class Duplicates:
    """Answers by question digest (16 bytes): DAPO has 1.8 million rows for 17,000 problems."""

    def __init__(self) -> None:
        self._answers: dict[bytes, str | None] = {}  # None: the rows of the question have different answers

    def repeated(self, row: Row) -> str:
        """The reason to skip a question that was seen before, else empty. Records the question and its answer."""
        key, answer = _digest(row), normalized(row.answer)
        if key not in self._answers:
            self._answers[key] = answer
            return ""
        first = self._answers[key]
        if first is not None and _contradict(answer, first):
            self._answers[key] = None
        return "duplicate"

    def contradicted(self, row: Row) -> str:
        """The reason to skip a question with different answers in the rows seen so far, else empty."""
        return "contradicted by a duplicate" if self._answers[_digest(row)] is None else ""


def _contradict(answer: str, first: str) -> bool:
    """Whether two answers differ. Those that are too long for the verifier are compared as texts only."""
    if answer == first:
        return False
    return max(len(answer), len(first)) > MAX_ANSWER_CHARS or settle(answer, first) is not True


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(normalized(plain_text(row.question)).encode(), digest_size=16).digest()


class Benchmarks:
    """Benchmark questions that must not occur in the training set.

    Example:
        benchmarks = Benchmarks(threshold=0.5)
        benchmarks.add("gsm8k", ["Janet's ducks lay 16 eggs per day. ..."])
        benchmarks.overlapping("Janet's ducks lay 18 eggs per day. ...")  # "gsm8k"
    """

    def __init__(self, *, threshold: float, ngram: int = 10) -> None:
        self._ngram, self._threshold = ngram, threshold
        self._held: list[tuple[str, int]] = []  # benchmark and number of shingles of each question
        self._by_shingle: dict[Shingle, list[int]] = {}
        self._short: dict[str, str] = {}

    def add(self, name: str, questions: Iterable[str], *, whole: bool = False) -> None:
        """Add the questions of a benchmark.

        Args:
            name: of the benchmark.
            questions: as plain text.
            whole: compare as text only. Generated questions share the words of their template.
        """
        distinct = list({_spelling(question): question for question in questions}.values())
        frame = set() if whole else self._frame(distinct)
        for question in distinct:
            shingles = set() if whole else self._shingles(question, frame)
            if not shingles:
                self._short[_spelling(question)] = name
                continue
            for shingle in shingles:
                self._by_shingle.setdefault(shingle, []).append(len(self._held))
            self._held.append((name, len(shingles)))

    def overlapping(self, question: str) -> str:
        """Name of the benchmark that `question` overlaps, the first added if several; empty if none."""
        if name := self._short.get(_spelling(question)):
            return name
        shingles = self._shingles(question) if self._by_shingle else ()
        hits = Counter(held for shingle in shingles for held in self._by_shingle.get(shingle, ()))
        first = min((held for held, hit in hits.items() if hit / self._held[held][1] >= self._threshold), default=None)
        return "" if first is None else self._held[first][0]

    def _frame(self, questions: Sequence[str]) -> set[Shingle]:
        """The shingles of more than half of the questions, such as those of an instruction at the end of each."""
        if len(questions) < MIN_FRAMED:
            return set()
        counts = Counter(shingle for question in questions for shingle in self._shingles(question))
        return {shingle for shingle, count in counts.items() if 2 * count > len(questions)}

    def _shingles(self, question: str, frame: Collection[Shingle] = ()) -> set[Shingle]:
        """The shingles of a question without a word of the frame."""
        words = _WORD.findall(normalized(question).lower())
        shingles = list(zip(*(words[first:] for first in range(self._ngram)), strict=False))
        if not frame:
            return set(shingles)
        framed = [place for place, shingle in enumerate(shingles) if shingle in frame]
        touched = {near for place in framed for near in range(place - self._ngram + 1, place + self._ngram)}
        return {shingle for place, shingle in enumerate(shingles) if place not in touched}


def _spelling(question: str) -> str:
    return normalized(question).casefold()
