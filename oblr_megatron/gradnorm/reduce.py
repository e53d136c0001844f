"""From what each rank of a replica took down to the norms: complete the partials, square, count once, add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from oblr_megatron.gradnorm.kernels import row_dots, row_sq_norms

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.gradnorm.capture import Captured, TiedRows
    from oblr_megatron.model.parallel import Parallel


class Reducer:
    """The sums over ranks that make the norms exact, one method each.

    Every rank of a replica calls `finish` after each pass, with the same samples in the same order.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def finish(self, captured: Captured) -> Tensor:
        """[n] fp64 squared norms, the same on every rank of the replica."""
        norms = captured.sq_norms.clone()
        for partials in captured.partials:
            norms += self.partials(partials)
        if captured.tied_rows is not None:
            norms += self.tied_cross_term(captured.tied_rows, len(norms))
        return self.total(norms)

    def partials(self, partials: Tensor) -> Tensor:
        """[n, P] summands -> [n]: summed over TP as vectors, then squared, counted on TP rank 0."""
        if partials.shape[1]:
            dist.all_reduce(partials, group=self.parallel.tp_group)
        norms = row_sq_norms(partials)
        return norms if self.parallel.tp_rank == 0 else torch.zeros_like(norms)

    def tied_cross_term(self, tied: TiedRows, num_samples: int) -> Tensor:
        """[n]: 2 <E_first, E_last>, which both ends' own squares leave out; counted on the first stage.

        The embedding group joins the two ends that hold the same shard of the vocabulary.
        """
        group = self.parallel.embedding_group
        assert group is not None, "a tied embedding on a stage that belongs to no embedding group"
        last = dist.get_process_group_ranks(group)[-1]
        rows = tied.rows if dist.get_rank() == last else torch.empty_like(tied.rows)
        dist.broadcast(rows, src=last, group=group)
        norms = torch.zeros(num_samples, dtype=torch.float64, device=rows.device)
        if self.parallel.is_first_stage:
            norms.index_add_(0, tied.sample, 2.0 * row_dots(tied.rows, rows))
        return norms

    def total(self, norms: Tensor) -> Tensor:
        """Add up the ranks of the replica."""
        dist.all_reduce(norms, group=self.parallel.model_group)
        return norms
