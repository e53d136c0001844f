"""Which parameters travel in one message when the weights are gathered. Imports no torch.

    found = pieces(shape, tp=2, ep=8, etp=1, padded_vocab=151936, budget=2**28)
    found[1].owners[0]        # parameters of layer 0 outside its experts
    found[2].owners[3]        # experts of layer 0 on expert-parallel rank 3

A layer's parameters outside experts share a piece, and so do its experts, up to `budget` elements. Every rank of a
piece's group sends equally many elements, which is one all-gather: [ranks, elements]. A layer of experts over the
budget is cut at the same local experts of all expert-parallel ranks, so its experts come in another order:

    4 experts on 2 ranks, all in one piece: 0, 1, 2, 3;  in two pieces: 0, 2 and then 1, 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod

from oblr_megatron.weights.names import Entry, ModelShape, layer_of, shard_shape, table


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters of one all-gather.

    Example, the second linear layer of 4 experts on EP 2 x ETP 2:
        Piece(owners=((fc2 of expert 0, fc2 of expert 1), (fc2 of expert 2, fc2 of expert 3)),
              shapes=((2048, 384), (2048, 384)), ranks=2)
    """

    owners: tuple[tuple[Entry, ...], ...]  # by expert-parallel rank; a single one outside experts
    shapes: tuple[tuple[int, ...], ...]  # of the shards; the same for every owner
    ranks: int  # that each owner's parameters are cut over, or copied to

    @property
    def experts(self) -> bool:
        """Whether it holds experts."""
        return self.owners[0][0].expert is not None

    @property
    def items(self) -> Iterator[Entry]:
        """Its parameters, in the order of the stream."""
        return (item for items in self.owners for item in items)

    @property
    def numel(self) -> int:
        """Elements of all shards together."""
        return len(self.owners) * self.ranks * sum(map(prod, self.shapes))


@lru_cache(maxsize=4)  # called at every push
def pieces(shape: ModelShape, *, tp: int, ep: int, etp: int, padded_vocab: int, budget: int) -> tuple[Piece, ...]:
    """All parameters of a model in the order of a push.

    A piece holds at least one whole parameter. A piece of experts holds at least one matrix from every expert-parallel
    rank. A smaller budget is raised to that.

    Args:
        shape: the model's sizes.
        tp, ep, etp: numbers of tensor-, expert- and expert-tensor-parallel ranks.
        padded_vocab: rows of the vocabulary matrices with padding.
        budget: elements of a piece.
    """
    singles: list[list[Piece]] = []  # by layer, and whether they are experts
    for _, group in groupby(table(shape), _group_of):
        items = list(group)
        owners, ranks = (ep, etp) if items[0].expert is not None else (1, tp)
        share = len(items) // owners
        cuts = [shard_shape(item, shape, tp_size=ranks, padded_vocab=padded_vocab) for item in items[:share]]
        singles.append(
            [
                Piece(tuple((items[owner * share + index],) for owner in range(owners)), (cut,), ranks)
                for index, cut in enumerate(cuts)
            ]
        )
    budget = max(budget, *(single.numel for group in singles for single in group))
    return tuple(_joined(run) for group in singles for run in _runs(group, budget))


def _group_of(item: Entry) -> tuple[int | None, bool, bool]:
    """Parameters with equal keys may share a piece.

    A vocabulary matrix has its own piece, because one view needs contiguous rows.
    """
    return layer_of(item), item.expert is not None, item.cut == "vocab"


def _runs(singles: Sequence[Piece], budget: int) -> Iterator[list[Piece]]:
    """Neighbours that fit the budget together."""
    run: list[Piece] = []
    for single in singles:
        if run and sum(each.numel for each in run) + single.numel > budget:
            yield run
            run = []
        run.append(single)
    yield run


def _joined(run: Sequence[Piece]) -> Piece:
    owners = zip(*(single.owners for single in run), strict=True)
    return Piece(
        tuple(tuple(item for (item,) in owner) for owner in owners),
        tuple(single.shapes[0] for single in run),
        run[0].ranks,
    )
