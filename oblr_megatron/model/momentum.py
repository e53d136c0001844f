"""The running average of past gradients, read by the "momentum" estimator of the gradient signal.

    momentum = momentum_of(policy, config)        # None unless algo.snr.estimator is "momentum"
    dot = momentum.dot_and_add(sq_norm)           # <g_t, m_{t-1}>, then g_t is added to m; NaN in the first step

Each rank averages its part of the summed gradient, like a moment of the optimizer. That costs the memory of one more
gradient in the gradient's precision (fp32, or fp64 in fp64 runs), or a share of one with the distributed optimizer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map

from oblr_megatron.algo.snr import MOMENTUM_HORIZON
from oblr_megatron.model.optimizer import over_parameters
from oblr_megatron.model.shards import held, is_sharded, pieces, put_back
from oblr_megatron.model.sq_norms import dot
from oblr_megatron.model.taps import main_grad

if TYPE_CHECKING:
    from torch import Tensor

    from oblr_megatron.config import Config
    from oblr_megatron.model.policy import Policy


def momentum_of(policy: Policy, config: Config) -> GradientMomentum | None:
    """The average that the configured estimator needs; None if it needs none."""
    return GradientMomentum(policy, MOMENTUM_HORIZON) if config.algo.snr.estimator == "momentum" else None


class GradientMomentum:
    """m_t = m_{t-1} + (g_t - m_{t-1}) / horizon from m = 0, read as m / weight, the sum of the gradients' weights in m.

    The correction makes the average of a constant gradient that gradient, also if a resumed run has another horizon.
    The horizon is more than 1 step. Every rank creates one.
    """

    def __init__(self, policy: Policy, horizon: float) -> None:
        self._policy, self._horizon = policy, horizon
        spans = held(policy)
        self._spans = {name: spans[parameter] for name, parameter in policy.trained_parameters()}
        self._sums: dict[str, Tensor] = {  # flattened
            name: torch.zeros_like(main_grad(parameter).flatten()[spans[parameter]])
            for name, parameter in policy.trained_parameters()
        }
        self._weight = 0.0

    def dot_and_add(self, sq_norm: float) -> float:
        """<main_grad, average so far> over all ranks; then add main_grad to the average. Collective.

        `sq_norm` is ||main_grad||^2, reduced over all ranks and unclipped. Returns NaN before the first gradient. Also
        NaN, with the average unchanged, if main_grad is zero or not finite.
        """
        if not 0 < sq_norm < math.inf:
            return math.nan
        product = math.nan
        if self._weight:
            product = over_parameters(self._policy, lambda name, grad: dot(grad, self._sums[name])) / self._weight
        for name, parameter in self._policy.trained_parameters():
            self._sums[name].lerp_(main_grad(parameter).flatten()[self._spans[name]], 1 / self._horizon)
        self._weight += (1 - self._weight) / self._horizon
        return product

    def sharded_state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """The state for megatron-core's distributed checkpoints, to save or to load into.

        Each average is cut like its weight in `model_state`, the policy's sharded state dict.
        """
        names, parameters = zip(*self._policy.trained_parameters(), strict=True)
        cuts = get_param_id_to_sharded_param_map(model_state, iter(parameters))
        alone = is_sharded(self._policy)
        sums = {
            name: pieces(cuts[index], "gradient_momentum", self._sums[name], self._spans[name], alone=alone)
            for index, name in enumerate(names)
        }
        return {"sums": sums, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a `sharded_state_dict` that a checkpoint was loaded into."""
        for name, tensor in self._sums.items():
            put_back(tensor, state["sums"].get(name, {}))
        self._weight = float(state["weight"])
