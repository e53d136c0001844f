"""The routers of a mixture of experts, replayed routes, and the losses that keep the experts' loads balanced.

    auxiliary loss   sum_m T_m / T  E sum_e f_e P_e     Switch Transformer, arXiv 2101.03961
    z-loss           1 / T sum_x (log sum_e exp z_e)^2  ST-MoE, arXiv 2202.08906

per layer, with T trained tokens in the step, T_m of them in microbatch m (over all ranks that share its sequences),
E experts, f_e the fraction of selections of expert e, P_e its mean probability, z the router's logits. megatron-core
computes the value and gradient of one microbatch. The weight T_m / T turns the sum over microbatches, folds and
replicas into a mean over tokens. f still depends on how samples are grouped into microbatches (docs/moe.md).

Routing replay (R3, arXiv 2510.11370) takes the experts of a token from the rollout, and their weights from the trainer.

    routers = RouterLosses(policy, config.model)
    routers.begin(tokens, first=True)                                  # T, the same on every rank
    run_schedule(policy, batches, loss_fn, routers=routers)            # any number of times
    routers.metrics()                                                  # collective
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from oblr_megatron.runtime.device_copy import to_device
from oblr_megatron.types import MicroBatch, RouterMetrics

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.policy import Policy
    from oblr_megatron.model.tapped import TappedModel
    from oblr_megatron.types import TokenRows


class Router(TopKRouter):
    """Routes as transformers does: softmax over all experts, then the top k, renormalised if the model says so.

    megatron-core's router always computes the softmax in fp32, which would be the only inexact step of an fp64 model.

    Args:
        renormalise: whether the weights of a token's experts sum to 1.
        replays: whether the routes of a microbatch replace the router's own choice.
        arguments: of megatron-core's router.
    """

    def __init__(self, *, renormalise: bool, replays: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.renormalise, self.replays = renormalise, replays
        self.losses: RouterLosses | None = None  # set by routers_of
        self.trained: Tensor | None = None  # [n] bool, set by RouterBatch.enter
        self.routes: Tensor | None = None  # [n, k] int16, likewise
        self.to(torch.cuda.current_device())  # megatron-core moves it in the first forward, after main_grad exists

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[t, b, E] -> each token's expert weights [t * b, E], zero if not selected, and the selection [t * b, E] bool.

        Padding is routed like any token; `padding_mask` is not used. A token with a route in `routes` takes these
        experts. Their weights are the trainer's own scores, so that the router learns from them as from its own choice.
        """
        losses = self.losses if torch.is_grad_enabled() else None  # recomputed layers count once
        trained, logits = self.trained, logits.flatten(0, -2)
        if losses is not None:
            assert trained is not None, "only run_schedule has passes with router losses"
            logits = losses.with_z_loss(self, logits, trained)
        scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top, indices = scores.topk(self.topk, dim=-1)
        own, known = indices, None
        if self.routes is not None:
            known = (self.routes >= 0).all(-1, keepdim=True)
            indices = torch.where(known, self.routes, own)
            top = scores.gather(1, indices)
        if self.renormalise:
            top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(1, indices, top)
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
        if losses is not None:
            assert trained is not None, "checked above"
            weights = losses.with_aux_loss(self, weights, scores, selected, trained)
            if known is not None:
                losses.compare(self, selected.gather(1, own), known & trained[:, None])
        return weights, selected


class RouterBatch:
    """A microbatch as the routers of one model chunk see it: this rank's n = t * b tokens, in megatron-core's order.

    Backward runs layers again under recomputation. A router then has to know which microbatch this is: with a pipeline,
    other microbatches ran forward in between. So the schedule enters the microbatch before each forward and backward.
    """

    def __init__(self, routers: Sequence[Router], batch: TokenRows) -> None:
        self._routers = routers
        self._trained = self._routes = None
        if not routers:
            return
        self._trained = self._own(batch.mask).flatten()
        if routers[0].replays and isinstance(batch, MicroBatch) and batch.routes is not None:
            first, config = routers[0].layer_number - 1, routers[0].config
            needed = (config.num_layers, config.moe_router_topk)
            assert batch.routes.shape[2:] == needed, f"routes are {batch.routes.shape}, the model needs {needed}"
            own = self._own(batch.routes)[:, :, first : first + len(routers)]
            self._routes = to_device(own.flatten(0, 1), batch.mask.device)

    def enter(self) -> None:
        """Give the routers this microbatch's tokens."""
        for place, router in enumerate(self._routers):
            router.trained = self._trained
            router.routes = None if self._routes is None else self._routes[:, place]

    def _own(self, values: Tensor) -> Tensor:
        """This rank's part of [b, t, ...] under sequence parallelism, as [t, b, ...]."""
        router, values = self._routers[0], values.transpose(0, 1)
        if not router.config.sequence_parallel:
            return values
        return values.chunk(router.tp_group.size())[router.tp_group.rank()]


@contextmanager
def routers_of(model: TappedModel, losses: RouterLosses | None) -> Iterator[list[list[Router]]]:
    """The routers of each chunk in order of layers, with losses. At the end they forget these and their tokens."""
    routers = [[module for module in chunk.modules() if isinstance(module, Router)] for chunk in model.chunks]
    for router in chain.from_iterable(routers):
        router.losses = losses
    try:
        yield routers
    finally:
        for router in chain.from_iterable(routers):
            router.losses = router.trained = router.routes = None


class RouterLosses:
    """The losses of a policy's routers, active only inside `routers_of`.

    Args:
        policy: a mixture of experts; records stay on its device until `metrics`.
        config: provides the coefficients. With coefficient 0 a loss is recorded but has no gradient.
    """

    def __init__(self, policy: Policy, config: ModelConfig) -> None:
        self._aux = config.moe_aux_loss_coeff
        self._z = config.moe_z_loss_coeff
        transformer = policy.transformer_config
        self._experts, self._topk = transformer.num_moe_experts or 0, transformer.moe_router_topk
        # [layer]: tokens of each expert, auxiliary loss, z-loss, replayed choices that differ, replayed choices
        self._sums = torch.zeros(
            transformer.num_layers, self._experts + 4, dtype=torch.float64, device=policy.parallel.device
        )
        self._tokens = self._recorded = 0  # trained tokens: of this pass (T), and of all passes of the step so far

    def begin(self, tokens: int, *, first: bool) -> None:
        """Expect a pass of `tokens` over all replicas. The `first` of a step clears the records of the step before."""
        if first:
            self._sums.zero_()
            self._recorded = 0
        self._tokens = tokens
        self._recorded += tokens

    @property
    def records(self) -> Tensor:
        """A copy of the step's records, for `restore`."""
        return self._sums.clone()

    def restore(self, records: Tensor) -> None:
        """Forget what was recorded since: a part of the pass runs again without some samples, which T still counts."""
        self._sums.copy_(records)

    def with_z_loss(self, router: Router, logits: Tensor, trained: Tensor) -> Tensor:
        """The same logits [n, E]; their backward adds the gradient of the z-loss over `trained` tokens [n]."""
        with torch.set_grad_enabled(self._z > 0):
            loss = z_loss_func(logits, 1.0, padding_mask=~trained) * trained.sum()
        return self._attach(router, self._experts + 1, logits, loss, self._z)

    def with_aux_loss(
        self, router: Router, weights: Tensor, scores: Tensor, selected: Tensor, trained: Tensor
    ) -> Tensor:
        """The same weights [n, E]; their backward adds the gradient of the auxiliary loss.

        f counts the tokens of all ranks that share the microbatch's sequences.
        """
        counts = (selected & trained[:, None]).sum(0)
        self._record(router)[: self._experts] += counts
        with torch.set_grad_enabled(self._aux > 0):
            counts = reduce_from_tensor_model_parallel_region(counts, router.tp_cp_group)
            tokens = (counts.sum() // self._topk).to(scores.dtype)
            loss = tokens * switch_load_balancing_loss_func(
                probs=scores * trained[:, None],
                tokens_per_expert=counts,
                total_num_tokens=tokens.clamp(min=1),
                topk=self._topk,
                num_experts=self._experts,
                moe_aux_loss_coeff=1.0,
            )
        return self._attach(router, self._experts, weights, loss, self._aux)

    def compare(self, router: Router, agree: Tensor, counted: Tensor) -> None:
        """Count the router's own choices that are not among the replayed ones.

        `agree` [n, k] bool: whether each own choice was replayed; `counted` [n, 1]: the trained tokens with a route.
        """
        record = self._record(router)
        record[-2] += (~agree & counted).sum()
        record[-1] += counted.sum() * self._topk

    def metrics(self) -> RouterMetrics | None:
        """Losses and largest load of the step so far, over all ranks and layers; None if no token was trained on."""
        if not self._recorded:
            return None
        sums = self._sums.clone()
        dist.all_reduce(sums)  # no rank repeats a token of a layer: checks/layout.py refuses tp without sp
        means = sums / self._recorded
        aux, z, _, _ = means[:, self._experts :].mean(0).tolist()
        largest = means[:, : self._experts].max() * self._experts / self._topk
        differing, replayed = sums[:, -2:].sum(0).tolist()
        mismatch = differing / replayed if replayed else None
        return RouterMetrics(aux_loss=aux, z_loss=z, max_load=float(largest), route_mismatch_fraction=mismatch)

    def _attach(self, router: Router, column: int, values: Tensor, loss: Tensor, coefficient: float) -> Tensor:
        self._record(router)[column] += loss.detach()
        if not coefficient:
            return values
        return MoEAuxLossAutoScaler.apply(values, loss * (coefficient / max(1, self._tokens)))

    def _record(self, router: Router) -> Tensor:
        return self._sums[router.layer_number - 1]
