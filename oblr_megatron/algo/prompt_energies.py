"""How long prompts keep their gradient energy: two metrics that tell whether sampling prompts by it would pay.

The energy of a prompt is e = E[A^2 w], its part of the gradient's noise. If prompts were drawn with p ~ sqrt(e) and
weighted by 1 / p, the gradient would stay unbiased and its noise would fall, as far as earlier energies predict later
ones. With ebar the mean energy of earlier steps, and S, n a prompt's decayed sums of e / ebar and of its visits:

    x = (S - n) / (n + 1)        the history, shrunk by one visit
    y = e / ebar - 1             what it should predict
    trust = <y x> / <x^2>        between 0 and 1
    p = 0.8 sqrt(m) / mean sqrt(m) + 0.2,    m = 1 + trust x        relative to the uniform p
    noise = <e / p> / <e>        of sampling by p over that of uniform sampling

<> are sums over the prompts of earlier steps, decayed by rho a step. trust and p are those before the step, so that the
noise is an honest prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FLOOR = 0.2  # uniform part of p: bounds the weights 1 / p by 5


class PromptEnergies:
    """The histories and sums, the same on every rank.

    Args:
        decay: rho; of a prompt's history when the prompt comes again, of all other sums a step.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._prompts: dict[str, list[float]] = {}  # S, n
        self._mean = [0.0, 0.0]  # e, prompts
        self._trust = [0.0, 0.0]  # y x, x^2
        self._noise = [0.0, 0.0]  # e / p, e

    def observe(self, energies: Mapping[str, float]) -> None:
        """Add a step: the energies by prompt."""
        if not energies:
            return
        total, count = self._mean if self._mean[0] > 0 else (sum(energies.values()), float(len(energies)))
        if total > 0:
            relative = {prompt: energy * count / total for prompt, energy in energies.items()}
            history = {prompt: self._history(prompt) for prompt in energies}
            roots = {prompt: math.sqrt(1 + self.trust * x) for prompt, x in history.items()}
            mean = statistics.fmean(roots.values())
            shares = {prompt: (1 - FLOOR) * root / mean + FLOOR for prompt, root in roots.items()}
            if any(history.values()):
                terms = [sum(e / shares[prompt] for prompt, e in relative.items()), sum(relative.values())]
                self._noise = self._added(self._noise, terms)
                terms = [sum((relative[prompt] - 1) * x for prompt, x in history.items())]
                self._trust = self._added(self._trust, [*terms, sum(x * x for x in history.values())])
            for prompt, energy in relative.items():
                self._prompts[prompt] = self._added(self._prompts.get(prompt, [0.0, 0.0]), [energy, 1.0])
        self._mean = self._added(self._mean, [sum(energies.values()), float(len(energies))])

    @property
    def trust(self) -> float:
        """Least-squares weight of a prompt's own history, between 0 and 1; 0 while nothing is known."""
        return least_squares(self._trust)

    def metrics(self) -> dict[str, float]:
        """Both metrics; {} before a prompt came again."""
        if not (self._trust[1] > 0 and self._noise[1] > 0):
            return {}
        return {"pool/energy_trust": self.trust, "pool/sampling_noise": self._noise[0] / self._noise[1]}

    def state_dict(self) -> dict[str, Any]:
        """JSON-compatible, and unchanged by later steps."""
        sums = {"mean": self._mean, "trust": self._trust, "noise": self._noise}
        return {"prompts": dict(self._prompts)} | sums  # every list is replaced, never changed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._prompts = dict(state["prompts"])
        self._mean, self._trust, self._noise = (list(state[name]) for name in ("mean", "trust", "noise"))

    def _history(self, prompt: str) -> float:
        """x; 0 without a history."""
        total, visits = self._prompts.get(prompt, (0.0, 0.0))
        return (total - visits) / (visits + 1)

    def _added(self, sums: Sequence[float], terms: Sequence[float]) -> list[float]:
        return added(self._decay, sums, terms)


def added(decay: float, sums: Sequence[float], terms: Sequence[float]) -> list[float]:
    """Sums after a step: the older ones decay."""
    return [decay * before + new for before, new in zip(sums, terms, strict=True)]


def least_squares(sums: Sequence[float]) -> float:
    """above / below, between 0 and 1; 0 while nothing is known."""
    above, below = sums
    return min(1.0, max(0.0, above / below)) if below > 0 else 0.0
