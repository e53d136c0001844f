"""Find duplicate training questions and training questions that overlap a benchmark. Both tests are exact.

Two questions are duplicates if they are equal after NFKC and white-space normalization. A shingle is a run of n
lower-cased words. A training question overlaps a benchmark question if it contains at least a given share of its
shingles. A question of fewer than n words has no shingles. It overlaps only an equal text, because "12+34" and "12*34"
have the same words.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from oblr_megatron.data.rows import Row, normalized, plain_text

_WORD = re.compile(r"[^\W_]+")  # finds the same words in "A_{1}" and "A_1"

Shingle = tuple[str, ...]


class Duplicates:
    """Answers by question digest (16 bytes): DAPO has 1.8 million rows for 17,000 problems."""

    def __init__(self) -> None:
        self._answers: dict[bytes, str | None] = {}  # None: the rows of the question have different answers

    def is_new(self, row: Row) -> bool:
        """Whether the question was not seen before. Records the question and its answer."""
        key, answer = _digest(row), normalized(row.answer)
        if key not in self._answers:
            self._answers[key] = answer
            return True
        if self._answers[key] != answer:
            self._answers[key] = None
        return False

    def contradicts(self, row: Row) -> bool:
        """Whether another row has the same question and a different answer."""
        return self._answers[_digest(row)] is None


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(normalized(plain_text(row.question)).encode(), digest_size=16).digest()


class _Held(NamedTuple):
    """A benchmark question."""

    name: str  # of the benchmark
    size: int  # number of shingles


class Benchmarks:
    """Benchmark questions that must not occur in the training set.

    Example:
        benchmarks = Benchmarks(ngram=10, threshold=0.5)
        benchmarks.add("gsm8k", ["Janet's ducks lay 16 eggs per day. ..."])
        benchmarks.overlapping("Janet's ducks lay 18 eggs per day. ...")  # "gsm8k"
    """

    def __init__(self, *, ngram: int, threshold: float) -> None:
        self._ngram, self._threshold = ngram, threshold
        self._held: list[_Held] = []
        self._by_shingle: dict[Shingle, list[int]] = {}
        self._short: dict[str, str] = {}

    def add(self, name: str, questions: Iterable[str], *, whole: bool = False) -> None:
        """Add the questions of a benchmark.

        Args:
            name: of the benchmark.
            questions: as plain text.
            whole: compare as text only. Generated questions share the words of their template.
        """
        for question in questions:
            shingles = set() if whole else self._shingles(question)
            if not shingles:
                self._short[_spelling(question)] = name
                continue
            for shingle in shingles:
                self._by_shingle.setdefault(shingle, []).append(len(self._held))
            self._held.append(_Held(name, len(shingles)))

    def overlapping(self, question: str) -> str:
        """Name of the benchmark that `question` overlaps, the first added if several; empty if none."""
        if name := self._short.get(_spelling(question)):
            return name
        shingles = self._shingles(question) if self._by_shingle else ()
        hits = Counter(held for shingle in shingles for held in self._by_shingle.get(shingle, ()))
        found = min(
            (held for held, hit in hits.items() if hit / self._held[held].size >= self._threshold), default=None
        )
        return "" if found is None else self._held[found].name

    def _shingles(self, question: str) -> set[Shingle]:
        words = _WORD.findall(normalized(question).lower())
        return set(zip(*(words[first:] for first in range(self._ngram)), strict=False))


def _spelling(question: str) -> str:
    return normalized(question).casefold()
