"""How a mixture's routers deal tokens to experts, and the losses that keep them balanced, in one pass alone.

    auxiliary loss   sum_m T_m / T  E sum_e f_e P_e     Switch Transformer, arXiv 2101.03961
    z-loss           1 / T sum_x (log sum_e exp z_e)^2  ST-MoE, arXiv 2202.08906

in each layer: over the T tokens that the step trains on, T_m of them in microbatch m (of all ranks that share its
sequences), E experts, f_e the share of choices that fell on expert e, P_e the mean probability, z the router's logits.
The values and gradients of one microbatch are megatron-core's; the weight T_m / T makes the sum over microbatches,
folds and replicas a mean over tokens, whoever has them. What a fold's microbatches are still enters f (docs/moe.md).

    routers = RouterLosses(policy, config.model)
    routers.begin(tokens)                                              # T, the same on every rank
    run_schedule(policy, batches, loss_fn, routers=routers)            # any number of times
    routers.figures()                                                  # collective
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from oblr_megatron.types import RouterMetrics

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.qwen3 import Policy


class Router(TopKRouter):
    """Softmax over all experts, the top k of them, made to sum to 1 where the model says so: as transformers routes.

    megatron-core's own routing takes the softmax in fp32 at all times, the one inexact step of a model in fp64.
    """

    def __init__(self, *, renormalise: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.renormalise = renormalise
        self.losses: RouterLosses | None = None  # in a pass that has them
        self.to(torch.cuda.current_device())  # megatron-core moves it in the first forward, after main_grad was made

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[t, b, E] -> the weights [t * b, E] of each token's experts, zero for the others, and which ones they are.

        Padding is routed like any token.

        Args:
            logits: of this rank's tokens.
            padding_mask: [t, b] bool, True for tokens that are trained on; given in a pass with losses, and only there.
        """
        losses = self.losses if torch.is_grad_enabled() else None  # layers that run again in backward count once
        trained = None if padding_mask is None else self._own(padding_mask, len(logits)).flatten()
        logits = logits.flatten(0, -2)
        if losses is not None:
            assert trained is not None, "a pass with router losses says which tokens are trained on"
            logits = losses.with_z_loss(self, logits, trained)
        scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        top, indices = scores.topk(self.topk, dim=-1)
        if self.renormalise:
            top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(1, indices, top)
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
        if losses is not None:
            assert trained is not None, "checked above"
            weights = losses.with_aux_loss(self, weights, scores, selected, trained)
        return weights, selected

    def _own(self, mask: Tensor, length: int) -> Tensor:
        """This rank's part under sequence parallelism; megatron-core cuts the mask on the first stage only."""
        return mask if len(mask) == length else mask.chunk(self.tp_group.size())[self.tp_group.rank()]


class RouterLosses:
    """The losses of a policy's routers: attached in the passes that ask for them, absent in all others.

    Args:
        policy: a mixture; what is recorded stays on its device until `figures`.
        config: the coefficients. With 0 a loss is recorded and has no gradient.
    """

    def __init__(self, policy: Policy, config: ModelConfig) -> None:
        self._routers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, Router)]
        self._aux = config.moe_aux_loss_coeff if config.moe_router_load_balancing_type == "aux_loss" else 0.0
        self._z = config.moe_z_loss_coeff
        transformer = policy.transformer_config
        self._experts, self._topk = transformer.num_moe_experts or 0, transformer.moe_router_topk
        self._sums = torch.zeros(  # of each layer: tokens of each expert, auxiliary loss, z-loss
            transformer.num_layers, self._experts + 2, dtype=torch.float64, device=policy.parallel.device
        )
        self._tokens = 0

    def begin(self, tokens: int) -> None:
        """Forget what was recorded; `tokens` T will be trained on by all replicas together."""
        self._sums.zero_()
        self._tokens = tokens

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Routers add their losses inside."""
        for router in self._routers:
            router.losses = self
        try:
            yield
        finally:
            for router in self._routers:
                router.losses = None

    def with_z_loss(self, router: Router, logits: Tensor, trained: Tensor) -> Tensor:
        """The logits [n, E] of a layer, with the z-loss of the tokens that are `trained` on [n] behind them."""
        with torch.set_grad_enabled(self._z > 0):
            loss = z_loss_func(logits, 1.0, padding_mask=~trained) * trained.sum()
        return self._attach(router, self._experts + 1, logits, loss, self._z)

    def with_aux_loss(
        self, router: Router, weights: Tensor, scores: Tensor, selected: Tensor, trained: Tensor
    ) -> Tensor:
        """The weights [n, E] of a layer's experts, with the auxiliary loss of this rank's tokens behind them.

        f is counted over all ranks that share the microbatch's sequences.
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

    def metrics(self) -> RouterMetrics | None:
        """What was recorded since `begin`, of all ranks' tokens and layers; None if no token was trained on."""
        if not self._tokens:
            return None
        dist.all_reduce(self._sums)  # no token of a layer is on two ranks: checks.py refuses tp without sp
        means = self._sums / self._tokens
        aux, z = means[:, self._experts :].mean(0).tolist()
        largest = means[:, : self._experts].max() * self._experts / self._topk
        return RouterMetrics(aux_loss=aux, z_loss=z, max_load=float(largest))

    def _attach(self, router: Router, column: int, values: Tensor, loss: Tensor, coefficient: float) -> Tensor:
        self._record(router)[column] += loss.detach()
        if not coefficient:
            return values
        return MoEAuxLossAutoScaler.apply(values, loss * (coefficient / max(1, self._tokens)))

    def _record(self, router: Router) -> Tensor:
        return self._sums[router.layer_number - 1]
