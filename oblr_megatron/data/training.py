"""The training sources without duplicates, contradicting answers and benchmark questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from oblr_megatron.data.long_rows import LongRows
from oblr_megatron.data.overlap import Benchmarks, Duplicates
from oblr_megatron.data.prompt_set import PromptSet, warn_of
from oblr_megatron.data.rows import Row, Skipped, plain_text, read_rows
from oblr_megatron.data.sources import distinct_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config.data import DataConfig, SourceConfig


def training_sets(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, held_out: Mapping[str, SourceConfig]
) -> list[PromptSet]:
    """The usable rows of each source of config.train. Logs one warning about the skipped rows.

    Args:
        config: sources, columns, template and filters.
        tokenizer: see `PromptSet`.
        held_out: benchmarks to exclude from training, in addition to config.exclude.

    Raises:
        UserError: a source cannot be read or has no usable row.
    """
    skipped: list[list[Skipped]] = [[] for _ in config.train]
    long_rows = LongRows(config, tokenizer)
    rows = _all(config, long_rows, skipped)
    if config.deduplicate:
        rows = _distinct(rows, [source.path for source in config.train], skipped)
    benchmarks = _benchmarks(config, held_out, long_rows)

    def overlap(row: Row) -> str:
        name = benchmarks.overlapping(plain_text(row.question))
        return f"overlapping {name}" if name else ""

    sets = [
        PromptSet(source.path, _without(overlap, kept, source.path, left_out), left_out, config, tokenizer)
        for source, kept, left_out in zip(config.train, rows, skipped, strict=True)
    ]
    warn_of(sets)
    return sets


def _all(config: DataConfig, long_rows: LongRows, skipped: list[list[Skipped]]) -> Sequence[Iterable[Row]]:
    """The rows of each source, without those that are far too long: huge texts need minutes to compare."""
    rows = (
        read_rows(source, config, left_out, training=True, names=names)
        for source, left_out, names in zip(config.train, skipped, distinct_names(config.train), strict=True)
    )
    return [
        _without(long_rows.exceeding, own, source.path, left_out)
        for own, source, left_out in zip(rows, config.train, skipped, strict=True)
    ]


def _distinct(
    rows: Sequence[Iterable[Row]], paths: Sequence[str], skipped: list[list[Skipped]]
) -> Sequence[Iterable[Row]]:
    """The first row of each question over all sources; questions with contradicting answers are skipped.

    A contradiction may come with the last row, so all first occurrences are held in memory.
    """
    duplicates = Duplicates()

    def repeated(row: Row) -> str:
        return "" if duplicates.is_new(row) else "duplicate"

    def contradicted(row: Row) -> str:
        return "contradicted by a duplicate" if duplicates.contradicts(row) else ""

    first = [list(_without(repeated, *own)) for own in zip(rows, paths, skipped, strict=True)]
    return [list(_without(contradicted, *own)) for own in zip(first, paths, skipped, strict=True)]


def _benchmarks(config: DataConfig, held_out: Mapping[str, SourceConfig], long_rows: LongRows) -> Benchmarks:
    """The questions of config.exclude and of the held-out sets; empty if overlaps are allowed.

    A question that is far longer than any prompt is left out, because no training row contains it.
    """
    benchmarks = Benchmarks(ngram=config.overlap_ngram, threshold=config.overlap_threshold)
    if config.overlap_threshold > 0:
        for name, source in [*((source.path, source) for source in config.exclude), *held_out.items()]:
            rows = _without(long_rows.exceeding, read_rows(source, config, []), name, [])
            benchmarks.add(name, (plain_text(row.question) for row in rows), whole=bool(source.gym_task))
    return benchmarks


def _without(reason_of: Callable[[Row], str], rows: Iterable[Row], path: str, skipped: list[Skipped]) -> Iterator[Row]:
    """The rows with an empty `reason_of`; the others are appended to `skipped` with their reason."""
    for row in rows:
        if reason := reason_of(row):
            skipped.append(row.left_out(path, reason))
        else:
            yield row
