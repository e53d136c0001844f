"""Real data sets in shared/data next to the checkout; skipped if absent.

Oracle of the overlap: the `overlaps_benchmark` column, computed with an independent index when the sets were prepared.
Not covered: the rows in the hub's format (test_conventions.py has one row of each set).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.data.rows import LOST_BACKSLASH, read_rows
from oblr_megatron.data.sources import named_source
from oblr_megatron.data.training import Benchmarks
from tests.unit.data.conftest import config

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
ROWS = {  # convention, rows without a lost backslash, rows that training uses
    "gsm8k_train": ("gsm8k", 7473, 7471),
    "gsm8k_test": ("gsm8k", 1319, 1319),
    "math500": ("math500", 500, 500),
    "olympiadbench": ("olympiadbench", 674, 674),
    "dapo_math_17k": ("dapo", 16531, 16411),  # 645 of its 17,176 rows have a form feed in place of "\\f" or "fi"
}
BENCHMARKS = ("gsm8k_test", "math500", "olympiadbench")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SHARED.is_dir(), reason=f"the sets are not in {SHARED}")]


def raw(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (SHARED / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("name", ROWS)
def test_a_set_loads_the_same_with_and_without_its_convention(name: str) -> None:
    convention, count, _ = ROWS[name]
    path = str(SHARED / f"{name}.jsonl")
    by_name, plain = named_source(f"{convention}={path}")[1], named_source(path)[1]
    assert (by_name.convention, plain.convention) == (convention, "")
    data = config(path)
    own, other = (list(read_rows(source, data, [])) for source in (by_name, plain))
    assert len(own) == count
    assert [row._replace(tolerance="") for row in own] == other
    answers = {f"{name}-{number}": row["answer"] for number, row in enumerate(raw(name))}
    assert all(row.answer == answers[f"{name}-{row.row}"] for row in own), "clean answers are not changed"
    tolerant = {row.id: row.tolerance for row in own if row.tolerance}
    assert tolerant == ({"olympiadbench-2592": "0.1"} if name == "olympiadbench" else {})


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer that makes each word the unknown token; these tests count rows only."""
    core = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "olympiadbench"])
def test_every_row_of_a_benchmark_is_evaluated(name: str, words: PreTrainedTokenizerFast) -> None:
    data = config({"path": str(SHARED / f"{name}.jsonl"), "convention": ROWS[name][0]})
    assert len(read_prompts(data.train[0], data, words)) == ROWS[name][1]


def test_a_mixture_of_training_sets(words: PreTrainedTokenizerFast) -> None:
    sources = [{"path": str(SHARED / f"{name}.jsonl"), "convention": ROWS[name][0]} for name in BENCHMARKS]
    held_out = dict(zip(BENCHMARKS, config(sources).train, strict=True))
    train = [str(SHARED / f"{name}.jsonl") for name in ("gsm8k_train", "dapo_math_17k")]
    prompts = PromptStream(config(train), words, seed=0, held_out=held_out)
    usable = ROWS["gsm8k_train"][2], ROWS["dapo_math_17k"][2]
    assert len(prompts) == sum(usable)
    reasons = [skip.reason for skip in prompts.skipped]
    assert sorted(set(reasons)) == [LOST_BACKSLASH, "duplicate", "flagged overlaps_benchmark"]
    assert reasons.count("duplicate") == 1
    ids = [prompt.id for prompt in prompts.next_prompts(len(prompts))]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["gsm8k_train", "dapo_math_17k"])
def test_overlaps_are_the_flagged_rows(name: str) -> None:
    benchmarks = Benchmarks(threshold=0.5)
    there = set()
    for benchmark in BENCHMARKS:
        rows = raw(benchmark)
        benchmarks.add(benchmark, (str(row["question"]) for row in rows))
        there |= {row["id"] for row in rows}
    rows = raw(name)
    flagged = {row["id"] for row in rows if there & set(row.get("overlaps_benchmark", ()))}
    assert len(flagged) == {"gsm8k_train": 2, "dapo_math_17k": 91}[name]
    assert {row["id"] for row in rows if benchmarks.overlapping(str(row["question"]))} == flagged
