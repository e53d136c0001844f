"""Dynamic sampling: groups with equal rewards are replaced by groups of further prompts.

Under most baselines a group of equal rewards has no gradient. Such groups are dropped, and further batches are sampled
until each place of the step holds a mixed group, or until the budget of batches is spent. A place without a replacement
keeps its group, so a step always has Q prompts (folds have equal sizes, sums are divided by Q * G).

    size of the next batch = min(Q, ceil(missing / share of mixed groups so far))

Sampling only the missing number would take many short calls if mixed groups are rare, and a call lasts as long as its
longest response. Sampling Q each time would waste most of a batch if one group is missing.

Mixed groups are taken in the order of the data, not in the order of completion, so short responses have no advantage.
The places are filled in an order drawn from the step's seed. Filling the first places first would leave the groups
without gradient in the last folds, and the folds must be equal in distribution.

docs/samples.md describes the effect on the estimates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblr_megatron.algo.baseline import mixed_groups
from oblr_megatron.types import Prompt, Sample, Scored

MAX_BATCHES = 4
"""Batches of num_prompts prompts that a step may sample; places still empty are filled with dropped groups."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, their responses and rewards.

    Example for q = 1, G = 2: Batch([prompt], [sample, sample], Scored(rewards=[[1., 0.]], lengths=[[5, 7]], failures=0)
    """

    prompts: list[Prompt]  # q
    samples: list[Sample]  # q * G, prompt-major
    scored: Scored


@dataclass(frozen=True, slots=True)
class Refilled:
    """A step's batch, and statistics of all batches sampled for it.

    Example, Q = 4 with one group replaced from a second batch of 2: Refilled(step,
                                                              rewards=[6, G] tensor, batches=2, dropped=1, unused=1)
    """

    step: Batch  # Q prompts, groups numbered 0..Q-1; its failures count all batches
    rewards: Tensor  # [S, G] fp64, of all S prompts sampled
    batches: int
    dropped: int  # groups of equal rewards that are not in the step
    unused: int  # mixed groups that are not in the step: the last batch had more than were missing

    def metrics(self) -> dict[str, float]:
        """Metrics for the step's record."""
        return {"rollout/dynamic_batches": self.batches, "groups/dropped": self.dropped, "groups/unused": self.unused}


def refill(first: Batch, draw: Callable[[int, int], Batch], *, max_batches: int, seed: int) -> Refilled:
    """Replace the groups of equal rewards among the step's Q prompts in `first`.

    Args:
        draw: (count, batch) -> the next `count` prompts of the data, sampled and scored; `batch` is 1, 2, ...
        max_batches: limit of all batches, including the first. Each has at most Q prompts.
        seed: for the order in which places are filled.
    """
    is_mixed = mixed_groups(first.scored.rewards)
    places = (~is_mixed).nonzero().flatten().tolist()
    random.Random(seed).shuffle(places)
    batches = [first]
    replacements: list[tuple[Batch, int]] = []
    while len(replacements) < len(places) and len(batches) < max_batches:
        sampled = sum(len(batch.prompts) for batch in batches)
        known = int(is_mixed.sum()) + len(replacements)
        size = next_size(len(places) - len(replacements), mixed=known, sampled=sampled, most=len(first.prompts))
        batch = draw(size, len(batches))
        batches.append(batch)
        replacements += [(batch, group) for group in mixed_groups(batch.scored.rewards).nonzero().flatten().tolist()]
    used = dict(zip(places, replacements, strict=False))
    equal = sum(int((~mixed_groups(batch.scored.rewards)).sum()) for batch in batches)
    return Refilled(
        step=assembled(
            {place: used.get(place, (first, place)) for place in range(len(first.prompts))},
            failures=sum(batch.scored.failures for batch in batches),
        ),
        rewards=torch.cat([batch.scored.rewards for batch in batches]),
        batches=len(batches),
        dropped=equal - (len(places) - len(used)),
        unused=len(replacements) - len(used),
    )


def next_size(missing: int, *, mixed: int, sampled: int, most: int) -> int:
    """Prompts of the next batch: the expected number needed, given the share of mixed groups so far; at most `most`.

    Example: next_size(3, mixed=16, sampled=64, most=64) = 12.
    """
    return min(most, -(-missing * sampled // mixed)) if mixed else most


def assembled(sources: Mapping[int, tuple[Batch, int]], failures: int) -> Batch:
    """A batch from prompts of other batches.

    Args:
        sources: position of a prompt in the step -> (a batch, the prompt's place in it); in the order of the result.
        failures: of the result.
    """
    size = next(iter(sources.values()))[0].scored.rewards.shape[1]
    return Batch(
        [batch.prompts[place] for batch, place in sources.values()],
        [
            replace(sample, group=position)
            for position, (batch, place) in sources.items()
            for sample in batch.samples[place * size : (place + 1) * size]
        ],
        Scored(
            rewards=torch.stack([batch.scored.rewards[place] for batch, place in sources.values()]),
            lengths=torch.stack([batch.scored.lengths[place] for batch, place in sources.values()]),
            failures=failures,
        ),
    )
