"""Dynamic sampling: groups whose rewards are all equal make room for further prompts of the stream. Pure torch.

Under most baselines a group of equal rewards has no gradient. Such groups are dropped, and further batches are sampled
until every place of the step holds a mixed group or the budget of batches is spent; a place that stays without a
replacement keeps the group it had, so that a step always has Q prompts (folds divide, sums are divided by Q * G).

    size of the next batch = min(Q, ceil(missing / share of mixed groups so far))

Only the missing number would take many short calls where mixed groups are rare, and a call lasts as long as its longest
response; Q at a time would throw most of a batch away where one group is missing. Mixed groups are taken in the order
of the stream, never in that of completion, so that short responses have no advantage. The places are filled in an order
drawn from the step's seed: were it the first places first, the last folds would hold all the groups without gradient,
and folds are taken for equal in distribution.

What it does to the estimates is said in docs/samples.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblr_megatron.algo.baseline import mixed_groups
from oblr_megatron.types import Prompt, Sample, Scored

SEED_STRIDE, BATCH_STRIDE = 1_000_003, 2**40


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, their responses, and what these earned.

    Example for q = 1, G = 2: Batch([prompt], [sample, sample], Judged(rewards=[[1., 0.]], lengths=[[5, 7]], failures=0)
    """

    prompts: list[Prompt]  # q
    samples: list[Sample]  # q * G, prompt-major
    scored: Scored


@dataclass(frozen=True, slots=True)
class Refilled:
    """A step's batch, and what was sampled for it.

    Example, Q = 4 of which one was replaced from a second batch of 2: Refilled(step, rewards=[6, G] tensor, batches=2,
                                                                                dropped=1, unused=1)
    """

    step: Batch  # Q prompts, groups numbered 0..Q-1; its failures are those of all batches
    rewards: Tensor  # [S, G] fp64 of everything that was sampled
    batches: int
    dropped: int  # groups of equal rewards that are not in the step
    unused: int  # mixed groups that are not in the step: the last batch found more than were missing

    def metrics(self) -> dict[str, float]:
        """For the step's record."""
        return {"rollout/dynamic_batches": self.batches, "groups/dropped": self.dropped, "groups/unused": self.unused}


def call_seed(seed: int, step: int, batch: int = 0) -> int:
    """The seed of one generate call: no two batches of a run's first million steps share one, nor does an evaluation.

    Args:
        seed: of the run.
        step: counted from 0.
        batch: of the step; the first is sampled just as without dynamic sampling.
    """
    return seed * SEED_STRIDE + step + batch * BATCH_STRIDE


def refill(first: Batch, draw: Callable[[int, int], Batch], *, max_batches: int, seed: int) -> Refilled:
    """Replace the groups of equal rewards.

    Args:
        first: the step's Q prompts.
        draw: (count, batch) -> the stream's next `count` prompts, sampled and judged; `batch` is 1, 2, ...
        max_batches: most batches in all, the first one included; each is of Q prompts at most.
        seed: of the order in which places are filled.
    """
    is_mixed = mixed_groups(first.scored.rewards)
    places = (~is_mixed).nonzero().flatten().tolist()
    random.Random(seed).shuffle(places)
    batches = [first]
    found: list[tuple[Batch, int]] = []
    while len(found) < len(places) and len(batches) < max_batches:
        sampled = sum(len(batch.prompts) for batch in batches)
        known = int(is_mixed.sum()) + len(found)
        size = next_size(len(places) - len(found), mixed=known, sampled=sampled, most=len(first.prompts))
        batch = draw(size, len(batches))
        batches.append(batch)
        found += [(batch, group) for group in mixed_groups(batch.scored.rewards).nonzero().flatten().tolist()]
    used = dict(zip(places, found, strict=False))
    equal = sum(int((~mixed_groups(batch.scored.rewards)).sum()) for batch in batches)
    return Refilled(
        step=_assemble(batches, used),
        rewards=torch.cat([batch.scored.rewards for batch in batches]),
        batches=len(batches),
        dropped=equal - (len(places) - len(used)),
        unused=len(found) - len(used),
    )


def next_size(missing: int, *, mixed: int, sampled: int, most: int) -> int:
    """Prompts of the next batch: as many as the share of mixed groups so far lets expect to be enough, at most `most`.

    Example: next_size(3, mixed=16, sampled=64, most=64) = 12.
    """
    return min(most, -(-missing * sampled // mixed)) if mixed else most


def _assemble(batches: Sequence[Batch], used: dict[int, tuple[Batch, int]]) -> Batch:
    """The first batch with some of its places taken by groups of the others."""
    first = batches[0]
    size = first.scored.rewards.shape[1]
    sources = [used.get(place, (first, place)) for place in range(len(first.prompts))]
    samples = [
        replace(sample, group=place)
        for place, (batch, group) in enumerate(sources)
        for sample in batch.samples[group * size : (group + 1) * size]
    ]
    scored = Scored(
        rewards=torch.stack([batch.scored.rewards[group] for batch, group in sources]),
        lengths=torch.stack([batch.scored.lengths[group] for batch, group in sources]),
        failures=sum(batch.scored.failures for batch in batches),
    )
    return Batch([batch.prompts[group] for batch, group in sources], samples, scored)
