"""The table of biases: which options leave a mean score of 0, and which do not. Enumerated in fp64.

Not covered: language models and layouts (tests/distributed/test_corrections.py).
"""

from __future__ import annotations

import pytest

from studies.bias import FILTERS, WEIGHTS, Row, Toy, lines, table


@pytest.mark.parametrize("seed", [0, 2])
def test_the_mean_score_is_zero_with_centering_and_else_only_with_whole_weights_of_what_was_drawn(seed: int) -> None:
    rows = table(seed)
    assert len(rows) == len(FILTERS) * len(WEIGHTS) * 4
    for row in rows:
        exact = row.centre or (row.weights == "none" and (row.replay or row.filter == "none"))
        assert row.drift < 1e-12 if exact else row.drift > 1e-3, row


def test_the_gradient_is_exact_where_sampler_and_policy_are_the_same() -> None:
    """With replay and without: a filter leaves an error, which replay removes; centering changes nothing of it."""
    toy = Toy.drawn(0)
    same = Toy(toy.features, toy.theta, toy.theta, toy.rewards)
    for name in FILTERS:
        for centre in (False, True):
            assert same.row(name, "none", replay=True, centre=centre).error < 1e-12, (name, centre)
            exact = name == "none"
            error = same.row(name, "none", replay=False, centre=centre).error
            assert error < 1e-12 if exact else error > 1e-2, (name, centre)


def test_a_line_has_the_four_columns_of_its_rows() -> None:
    rows = [Row("f", "cap", replay, centre, 0.1 + replay, 0.2 + centre) for replay in (0, 1) for centre in (0, 1)]
    assert lines(rows)[-1] == "| f | cap | 1e-01 / 2e-01 | 1e+00 / 2e-01 | 1e-01 / 1e+00 | 1e+00 / 1e+00 |"
