"""The routers of a mixture of experts, and the losses that keep the experts' loads balanced.

    auxiliary loss   sum_m T_m / T  E sum_e f_e P_e     Switch Transformer, arXiv 2101.03961
    z-loss           1 / T sum_x (log sum_e exp z_e)^2  ST-MoE, arXiv 2202.08906

per layer, with T trained tokens in the step, T_m of them in microbatch m (over all ranks that share its sequences),
E experts, f_e the fraction of selections of expert e, P_e its mean probability, z the router's logits. megatron-core
computes the value and gradient of one microbatch. The weight T_m / T turns the sum over microbatches, folds and
replicas into a mean over tokens. f still depends on how samples are grouped into microbatches (docs/moe.md).

    routers = RouterLosses(policy, config.model)
    routers.begin(tokens)                                              # T, the same on every rank
    run_schedule(policy, batches, loss_fn, routers=routers)            # any number of times
    routers.metrics()                                                  # collective
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from oblr_megatron.types import RouterMetrics

if TYPE_CHECKING:
    from oblr_megatron.config import ModelConfig
    from oblr_megatron.model.policy import Policy


class Router(TopKRouter):
    """Routes as transformers does: softmax over all experts, then the top k, renormalised if the model says so.

    megatron-core's router always computes the softmax in fp32, which would be the only inexact step of an fp64 model.
    """

    def __init__(self, *, renormalise: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.renormalise = renormalise
        self.losses: RouterLosses | None = None  # set by RouterLosses.attached
        self.to(torch.cuda.current_device())  # megatron-core moves it in the first forward, after main_grad exists

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[t, b, E] -> each token's expert weights [t * b, E], zero if not selected, and the selection [t * b, E] bool.

        Padding is routed like any token.

        Args:
            logits: of this rank's tokens.
            padding_mask: [t, b] bool, True for trained tokens; given only in a pass with router losses.
        """
        losses = self.losses if torch.is_grad_enabled() else None  # recomputed layers count once
        trained = None if padding_mask is None else self._own(padding_mask, len(logits)).flatten()
        logits = logits.flatten(0, -2)
        if losses is not None:
            assert trained is not None, "a pass with router losses needs the mask of trained tokens"
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
        """This rank's part of the mask under sequence parallelism; megatron-core cuts it only on the first stage."""
        return mask if len(mask) == length else mask.chunk(self.tp_group.size())[self.tp_group.rank()]


class RouterLosses:
    """The losses of a policy's routers, active only inside `attached`.

    Args:
        policy: a mixture of experts; records stay on its device until `metrics`.
        config: provides the coefficients. With coefficient 0 a loss is recorded but has no gradient.
    """

    def __init__(self, policy: Policy, config: ModelConfig) -> None:
        self._routers = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, Router)]
        self._aux = config.moe_aux_loss_coeff if config.moe_router_load_balancing_type == "aux_loss" else 0.0
        self._z = config.moe_z_loss_coeff
        transformer = policy.transformer_config
        self._experts, self._topk = transformer.num_moe_experts or 0, transformer.moe_router_topk
        self._sums = torch.zeros(  # [layer]: tokens of each expert, auxiliary loss, z-loss
            transformer.num_layers, self._experts + 2, dtype=torch.float64, device=policy.parallel.device
        )
        self._tokens = 0

    def begin(self, tokens: int) -> None:
        """Clear the records of the last step; T = `tokens` over all replicas."""
        self._sums.zero_()
        self._tokens = tokens

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Routers add their losses inside this context."""
        for router in self._routers:
            router.losses = self
        try:
            yield
        finally:
            for router in self._routers:
                router.losses = None

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

    def metrics(self) -> RouterMetrics | None:
        """Losses and largest load since `begin`, over all ranks and layers; None if no token was trained on."""
        if not self._tokens:
            return None
        dist.all_reduce(self._sums)  # no rank repeats a token of a layer: checks/layout.py refuses tp without sp
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
