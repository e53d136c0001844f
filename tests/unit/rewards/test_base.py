"""Results of a batch in parts, and parts as the result of a batch."""

from __future__ import annotations

import pytest

from oblr_megatron.rewards.base import RewardResult, divided, joined

WHOLE = RewardResult(
    [1.0, 0.0, 0.5, 0.0, 1.0, 0.25],
    faults={1: "late", 3: "failed"},
    error="ValueError: no number",
    side_faults=frozenset({3}),
    by_value=True,
    answers=["1", None, "2", None, "3", "4"],
    terms={"math": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], "format": [0.0, 0.0, 0.5, 0.0, 0.0, 0.25]},
)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_are_the_whole(parts: int) -> None:
    found = divided(WHOLE, parts)
    assert len(found) == parts and joined(found) == WHOLE
    assert sum(len(part.unscored) for part in found) == 1
    assert sum(part.failures for part in found) == sum(part.timeouts for part in found) == 1


def test_the_error_is_reported_once() -> None:
    first, second, third = divided(WHOLE, 3)
    assert (first.error, second.error, third.error) == ("ValueError: no number", None, None)
    assert second.faults == {1: "failed"} and second.answers == ["2", None] and second.terms["format"] == [0.5, 0.0]
    assert divided(RewardResult([]), 0) == [] and divided(RewardResult([1.0, 2.0]), 2)[1] == RewardResult([2.0])


def test_parts_of_unequal_sizes_are_joined_in_order() -> None:
    parts = [
        RewardResult([1.0]),
        RewardResult([]),
        RewardResult([0.0, 2.0], {1: "late"}),
        RewardResult([0.5], {0: "failed"}),
    ]
    assert joined(parts) == RewardResult([1.0, 0.0, 2.0, 0.5], {2: "late", 3: "failed"})
