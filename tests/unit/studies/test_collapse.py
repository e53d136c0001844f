"""The collapse study: arms of a seed begin alike, and fewer bits are a larger mismatch.

Not covered: which runs collapse, which rounding decides (docs/corrections.md has the counts).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from studies.collapse import Arm, Curve, trained

ARM = Arm("brackets", bits=3, weights="one", centre=False, seed=0)


@pytest.mark.nightly
def test_arms_differ_after_their_first_update(start: Path) -> None:
    def curve(arm: Arm) -> Curve:
        return trained(arm, start, steps=3, num_prompts=8, group_size=4, lr=1e-3)

    curves = [curve(replace(ARM, weights=weights, centre=centre)) for weights in ("one", "cap") for centre in (0, 1)]
    assert len({(one.reward[0], one.mismatch[0], one.entropy[0]) for one in curves}) == 1, "equal draws"
    assert len({one.entropy[1] for one in curves}) == len(curves), "each option changes the update"
    assert curve(ARM) == curves[0] and curve(replace(ARM, seed=1)).mismatch[0] != curves[0].mismatch[0]
    finer = [curve(replace(ARM, bits=bits)).mismatch[0] for bits in (3, 5, 8)]
    assert finer[0] > 2 * finer[1] > 4 * finer[2] > 0
