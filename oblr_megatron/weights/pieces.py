"""Groups of parameters that travel in one message when the weights are gathered. Imports no torch.

    parts = pieces(shape, tp=2, ep=8, etp=1, padded_vocab=151936, budget=2**28)
    parts[1].owners[0]        # parameters of layer 0 outside its experts
    parts[2].owners[3]        # experts of layer 0 on expert-parallel rank 3

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
class GatherPiece:
    """Parameters of one all-gather.

    Example, the second linear layer of 4 experts on EP 2 x ETP 2:
        GatherPiece(owners=((fc2 of expert 0, fc2 of expert 1), (fc2 of expert 2, fc2 of expert 3)),
                    shapes=((2048, 384), (2048, 384)), ranks=2)
    """

    owners: tuple[tuple[Entry, ...], ...]  # by expert-parallel rank; a single one outside experts
    shapes: tuple[tuple[int, ...], ...]  # of the shards; the same for every owner
    ranks: int  # each owner's parameters are cut over so many, or copied to them

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
def pieces(shape: ModelShape, *, tp: int, ep: int, etp: int, padded_vocab: int, budget: int) -> tuple[GatherPiece, ...]:
    """All parameters of a model in the order of a push.

    A piece holds at least one whole parameter. A piece of experts holds at least one matrix from every expert-parallel
    rank. A smaller budget is raised to that.

    Args:
        shape: the model's sizes.
        tp, ep, etp: numbers of tensor-, expert- and expert-tensor-parallel ranks.
        padded_vocab: rows of the vocabulary matrices with padding.
        budget: elements of a piece.
    """
    layers = []
    for _, group in groupby(table(shape), _group_of):
        items = list(group)
        owners, ranks = (ep, etp) if items[0].expert is not None else (1, tp)
        share = len(items) // owners
        owned = [items[owner * share : (owner + 1) * share] for owner in range(owners)]
        cuts = [shard_shape(item, shape, tp_size=ranks, padded_vocab=padded_vocab) for item in owned[0]]
        layers.append((owned, cuts, ranks, [owners * ranks * prod(cut) for cut in cuts]))
    budget = max(budget, *(size for *_, sizes in layers for size in sizes))
    return tuple(
        GatherPiece(tuple(tuple(items[run]) for items in owned), tuple(cuts[run]), ranks)
        for owned, cuts, ranks, sizes in layers
        for run in _runs(sizes, budget)
    )


def _group_of(item: Entry) -> tuple[int | None, bool, bool]:
    """Parameters with equal keys may share a piece.

    A vocabulary matrix has its own piece, because one view needs contiguous rows.
    """
    return layer_of(item), item.expert is not None, item.cut == "vocab"


def _runs(sizes: Sequence[int], budget: int) -> Iterator[slice]:
    """Neighbours that fit the budget together."""
    first = 0
    for index in range(1, len(sizes)):
        if sum(sizes[first : index + 1]) > budget:
            yield slice(first, index)
            first = index
    yield slice(first, len(sizes))
