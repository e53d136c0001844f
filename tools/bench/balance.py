"""How much longer the busiest replica computes than the mean, by the division of a step's prompts over replicas.

    python tools/bench/balance.py --json run/bench/balance.json     seconds

Steps of 256 prompts with 4 responses, of which lengths are drawn: a log-normal length for each prompt and one for each
response, with the coefficients of variation given. Each row has the mean over many steps of the busiest replica's
tokens over the mean replica's, if prompts go to replicas by their position, and as `gradient/folds.py` divides them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from record import publish

from oblr_megatron.data.packing import balanced_shares, local_folds

PROMPTS, GROUP, STEPS = 256, 4, 200
BETWEEN, WITHIN = 0.4, 0.6  # coefficients of variation of lengths: of prompts, of the responses to a prompt


@dataclass(frozen=True, slots=True)
class Row:
    """The busiest replica's tokens over the mean.

    Example: Row(replicas=32, folds_each=8, by_position=1.37, by_tokens=1.03)
    """

    replicas: int
    folds_each: int | str
    by_position: float
    by_tokens: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--between", type=float, default=BETWEEN, help="variation between prompts")
    parser.add_argument("--within", type=float, default=WITHIN, help="variation within a prompt's responses")
    options = parser.parse_args(arguments)
    generator = random.Random(0)
    steps = [lengths(generator, options.between, options.within) for _ in range(STEPS)]
    rows = []
    for replicas in (4, 8, 16, 32, 64):
        each = (folds for folds in (1, 2, 4, 8) if folds * replicas <= PROMPTS)
        rows += [row(steps, replicas, folds) for folds in each]
        rows.append(row(steps, replicas, None))
    publish(rows, "busiest replica / mean, tokens", options.json)


def lengths(generator: random.Random, between: float, within: float) -> list[int]:
    """Tokens of each prompt's responses together."""

    def factor(variation: float) -> float:
        spread = math.log(1 + variation**2)
        return generator.lognormvariate(-spread / 2, math.sqrt(spread))

    return [round(1000 * factor(between) * sum(factor(within) for _ in range(GROUP))) for _ in range(PROMPTS)]


def row(steps: Sequence[Sequence[int]], replicas: int, folds_each: int | None) -> Row:
    """Both divisions; without a number of folds, prompts are free, as with the "momentum" estimator."""
    folds = local_folds(PROMPTS, PROMPTS if folds_each is None else folds_each * replicas, 0, 1)
    by_position, by_tokens = [], []
    for step in steps:
        tokens = [sum(step[prompt] for prompt in fold) for fold in folds]
        size = len(folds) // replicas
        by_position.append([sum(tokens[at : at + size]) for at in range(0, len(folds), size)])
        by_tokens.append([sum(tokens[fold] for fold in share) for share in balanced_shares(tokens, replicas)])
    return Row(replicas, folds_each or "no folds", _busiest(by_position), _busiest(by_tokens))


def _busiest(steps: Sequence[Sequence[int]]) -> float:
    return mean(max(step) * len(step) / sum(step) for step in steps)


if __name__ == "__main__":
    main()
