"""The order of epochs and mixtures, and resuming.

Oracle of the order: counting. Every usable row comes exactly once per epoch, and the share of a source is off by less
than one prompt. Oracle of a resume: an uninterrupted stream. Not covered: resuming a killed run
(tests/e2e/test_resume.py).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from oblr_megatron.data.prompts import PromptStream, next_source, whole_weights
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import DATA, SUMS, stream, sums

BROKEN = DATA / "broken.jsonl"


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 10])
def test_every_epoch_contains_every_prompt_once(batch: int, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = stream(tokenizer, seed=3)
    taken = [prompt.row for _ in range(21) for prompt in prompts.next_prompts(batch)]
    for epoch in range(len(taken) // 7):
        assert sorted(taken[epoch * 7 : epoch * 7 + 7]) == list(range(7)), f"epoch {epoch}"
    assert max(Counter(taken).values()) - min(Counter(taken).values()) <= 1
    assert prompts.epoch == len(taken) // 7


def test_order_depends_on_seed_and_epoch(tokenizer: PreTrainedTokenizerFast) -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        prompts = stream(tokenizer, seed=seed)
        return [tuple(prompt.row for prompt in prompts.next_prompts(7)) for _ in range(3)]

    assert orders(0) == orders(0)
    assert len({*orders(0), *orders(1)}) == 6
    unshuffled = stream(tokenizer, shuffle=False)
    assert [prompt.row for prompt in unshuffled.next_prompts(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("before", [0, 3, 7, 10, 13, 14])
def test_resume_continues_at_the_next_prompt(before: int, tokenizer: PreTrainedTokenizerFast) -> None:
    whole, interrupted, resumed = (stream(tokenizer, seed=5) for _ in range(3))
    expected = whole.next_prompts(before + 20)[before:]
    interrupted.next_prompts(before)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert resumed.next_prompts(20) == expected
    assert resumed.epoch == whole.epoch


def test_resume_refuses_other_data(tokenizer: PreTrainedTokenizerFast) -> None:
    state = stream(tokenizer).state_dict()
    for other, key in (
        (stream(tokenizer, BROKEN), "fingerprint"),
        (stream(tokenizer, template="{question} "), "fingerprint"),
        (stream(tokenizer, seed=1), "seed"),
        (stream(tokenizer, {"path": str(SUMS), "convention": "minerva"}), "fingerprint"),  # differs by its tolerance
        (stream(tokenizer, keep_columns=True), "fingerprint"),
    ):
        with pytest.raises(UserError, match=f"with {key} "):
            other.load_state_dict(state)


def test_the_order_does_not_change_between_versions(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = stream(tokenizer, seed=11)
    for epoch in range(3):
        order = list(range(7))
        random.Random(f"11/{epoch}").shuffle(order)
        assert [prompt.row for prompt in prompts.next_prompts(7)] == order
    prompts.next_prompts(2)
    state = prompts.state_dict()
    assert (state["epoch"], state["index"], state["seed"], len(state)) == (3, 2, 11, 4)


@given(st.lists(st.floats(0.01, 100) | st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 400))
def test_shares_are_exact_to_less_than_a_prompt(weights: list[float], count: int) -> None:
    whole = whole_weights(weights)
    assert [Fraction(own, whole[0]) for own in whole] == [Fraction(own) / Fraction(weights[0]) for own in weights]
    taken = [0] * len(weights)
    for total in range(1, count + 1):
        taken[next_source(taken, whole)] += 1
        for source, weight in enumerate(whole):
            assert abs(taken[source] - Fraction(weight * total, sum(whole))) < 1
    assert sum(taken) == count


def test_the_docstring_example_of_next_source() -> None:
    taken, order = [0, 0], []
    for _ in range(8):
        order.append(next_source(taken, [3, 1]))
        taken[order[-1]] += 1
    assert order == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of 5, 3 and 11 different sums."""
    root = tmp_path_factory.mktemp("mixture")
    return [sums(root / f"{name}.jsonl", count, 100 * count) for name, count in (("a", 5), ("b", 3), ("c", 11))]


def mixture(
    tokenizer: PreTrainedTokenizerFast, files: list[Path], weights: tuple[float, ...] | None = None, seed: int = 0
) -> PromptStream:
    sources = [{"path": str(path)} for path in files]
    if weights is not None:
        sources = [{"path": str(path), "weight": weight} for path, weight in zip(files, weights, strict=True)]
    return stream(tokenizer, sources, seed=seed)


def test_default_weights_are_the_numbers_of_rows(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> None:
    prompts = mixture(tokenizer, files)
    assert len(prompts) == 19
    for epoch in range(3):
        assert prompts.epoch == epoch
        assert len({prompt.text for prompt in prompts.next_prompts(19)}) == 19, "each row once per epoch of all sources"


def test_sources_are_mixed_by_weight(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> None:
    prompts = mixture(tokenizer, files, (0.5, 0.25, 0.25))
    taken = prompts.next_prompts(80)
    assert Counter(prompt.source for prompt in taken) == {"a": 40, "b": 20, "c": 20}
    own = [prompt.row for prompt in taken if prompt.source == "a"]
    assert all(sorted(own[first : first + 5]) == list(range(5)) for first in range(0, 40, 5))
    assert prompts.epoch == 1, "20 prompts complete one epoch of c, which has 11 rows"


def test_sources_are_shuffled_differently(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    twins = [sums(tmp_path / f"{name}.jsonl", 30, first) for name, first in (("a", 0), ("b", 30))]
    taken = mixture(tokenizer, twins).next_prompts(60)
    own, other = ([prompt.row for prompt in taken if prompt.source == name] for name in "ab")
    assert sorted(own) == sorted(other) and own != other


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([None, (0.5, 0.25, 0.25), (1, 7, 0.3)]),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), max_size=5),
)
def test_a_mixture_resumes_at_the_next_prompt(tokenizer, files, weights, before, after) -> None:
    """`before` and `after` are sizes of the batches taken before the interruption and after it."""
    whole, interrupted, resumed = (mixture(tokenizer, files, weights) for _ in range(3))
    for count in before:
        assert interrupted.next_prompts(count) == whole.next_prompts(count)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert resumed.epoch == whole.epoch
    for count in [*after, 40]:
        assert resumed.next_prompts(count) == whole.next_prompts(count)
    assert resumed.state_dict() == whole.state_dict()


def test_a_mixture_refuses_the_position_of_another(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> None:
    state = mixture(tokenizer, files).state_dict()
    for other, key in (
        (mixture(tokenizer, files, (1, 1, 1)), "weights"),
        (mixture(tokenizer, files[::-1]), "fingerprint"),
        (mixture(tokenizer, files[:2]), "fingerprint"),
        (mixture(tokenizer, files[:1]), "fingerprint"),
        (mixture(tokenizer, files, seed=1), "seed"),
    ):
        with pytest.raises(UserError, match=f"with {key} "):
            other.load_state_dict(state)
        with pytest.raises(UserError):
            mixture(tokenizer, files).load_state_dict(other.state_dict())
