"""Energies of prompts: the prediction by hand, what lasts and what does not, and the state.

Not covered: whether the energies of a language model last.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from oblr_megatron.algo.prompt_energies import FLOOR, PromptEnergies


def test_two_steps_by_hand() -> None:
    energies = PromptEnergies(decay=0.5)
    energies.observe({"a": 3.0, "b": 1.0})
    assert energies.metrics() == {}, "no prompt came again"
    energies.observe({"a": 6.0, "b": 2.0})  # ebar 2: e / ebar = 3, 1; x = (1.5 - 1) / 2 and (0.5 - 1) / 2
    trust = (2 * 0.25 + 0 * -0.25) / (2 * 0.25**2)
    assert trust > 1
    assert energies.metrics() == {"pool/energy_trust": 1.0, "pool/sampling_noise": 1.0}, "nothing was known before"
    energies.observe({"a": 8.0, "b": 2.0})  # ebar (0.5 * 4 + 8) / (0.5 * 2 + 2) = 10 / 3; x = (3.75 - 1.5) / 2.5, ...
    x, y = np.array([0.9, -0.1]), np.array([8.0, 2.0]) / (10 / 3) - 1
    roots = np.sqrt(1 + x)  # trust was 1 before the step
    noise = 0.5 * 4 + ((y + 1) / ((1 - FLOOR) * roots / roots.mean() + FLOOR)).sum()
    found = energies.metrics()
    assert found["pool/sampling_noise"] == pytest.approx(noise / (0.5 * 4 + (y + 1).sum()))
    assert found["pool/energy_trust"] == pytest.approx(min(1, (0.5 * 0.5 + y @ x) / (0.5 * 0.125 + x @ x)))


def repeated(draw_energy, steps: int = 300, decay: float = 0.9) -> dict[str, float]:
    energies, prompts = PromptEnergies(decay), [f"prompt {n}" for n in range(32)]
    for _ in range(steps):
        energies.observe(dict(zip(prompts, draw_energy(), strict=True)))
    return energies.metrics()


def test_energies_that_last_are_trusted_and_would_save_noise() -> None:
    own = np.random.default_rng(0).lognormal(0, 2, 32)
    found = repeated(lambda: own)
    assert found["pool/energy_trust"] == pytest.approx(1, abs=0.01)
    roots = np.sqrt(own / own.mean())
    ideal = np.mean(own / ((1 - FLOOR) * roots / roots.mean() + FLOOR)) / own.mean()
    assert found["pool/sampling_noise"] == pytest.approx(ideal, rel=0.1) and ideal < 0.7


def test_energies_that_do_not_last_are_not_trusted() -> None:
    draw = np.random.default_rng(0)
    found = [repeated(lambda: draw.lognormal(0, 1, 32), steps=100) for _ in range(20)]
    assert np.mean([one["pool/energy_trust"] for one in found]) < 0.2
    assert np.mean([one["pool/sampling_noise"] for one in found]) == pytest.approx(1, abs=0.02)


def test_a_restored_state_goes_on_to_the_bit() -> None:
    draw, one, other = np.random.default_rng(0), PromptEnergies(0.9), PromptEnergies(0.9)
    steps = [{f"{n % 7}": float(value) for n, value in enumerate(draw.lognormal(0, 1, 5), start)} for start in range(9)]
    for step in steps[:5]:
        one.observe(step)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for step in steps[5:]:
        one.observe(step)
        other.observe(step)
    assert one.state_dict() == other.state_dict() and one.metrics() == other.metrics()
