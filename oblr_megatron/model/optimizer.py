"""megatron-core's optimizer for the policy, with the gradient norm and clipping computed in fp64 over all ranks.

    optimizer = PolicyOptimizer(policy, config.optimizer)
    sq_norm = grad_sq_norm(policy)
    optimizer.clip(sq_norm)
    optimizer.step(lr)

Call both reductions of step.py first. `parallel.use_distributed_optimizer` selects megatron-core's
DistributedOptimizer: each replica owns a share of the summed gradient, the moments and the fp32 masters. It updates its
share of the weights and all-gathers the rest before `step` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import nn

from oblr_megatron.config import OptimizerConfig
from oblr_megatron.errors import BrokenStepError, BrokenWeightsError
from oblr_megatron.model import cpu, moe
from oblr_megatron.model.host_state import HostState
from oblr_megatron.model.megatron_versions import take_rates
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy
from oblr_megatron.model.sharded_optimizer import load_sharded_state, sharded_state, stored_count
from oblr_megatron.model.shards import held, is_sharded
from oblr_megatron.model.sq_norms import sq_norm
from oblr_megatron.model.taps import main_grad
from oblr_megatron.runtime.collectives import all_reduce

ElementSum = Callable[[str, torch.Tensor], torch.Tensor]
"""(global name of a parameter, elements of its `main_grad` [n]) -> fp64 scalar, a sum over the elements."""


def optimizer_implementation() -> str:
    """The package that updates the weights: "transformer_engine", "apex" or "torch", the first megatron-core found."""
    package = megatron_optimizer.Adam.__module__.split(".")[0]
    return package if package in ("transformer_engine", "apex") else "torch"


def counted_here(parameter: nn.Parameter, parallel: Parallel) -> bool:
    """Whether this rank counts the parameter in a norm over all ranks of a replica.

    Shards count on every rank, copies on tensor-parallel rank 0, and a tied embedding on the first pipeline stage only.
    An expert counts once in a replica, or once in the block of replicas that share it.
    """
    if moe.is_expert(parameter):
        return parallel.expert_sum_group is None or parallel.expert_sum_group.rank() == 0
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, parallel.tp_group)


def grad_sq_norm(policy: Policy, *, reduced: bool = True) -> float:
    """||main_grad||^2 over all parameters, each counted once, summed over ranks in fp64.

    Collective over a replica; over the block if replicas share experts; over all ranks if the distributed optimizer
    has sharded the gradient.

    Args:
        policy: after `step.reduce_model_parallel_grads`.
        reduced: whether main_grad was also summed over replicas.
    """
    return over_parameters(policy, lambda _, grad: sq_norm(grad), reduced=reduced)


def over_parameters(policy: Policy, sum_of: ElementSum, *, reduced: bool = True) -> float:
    """Sum `sum_of` over all parameters, each element counted once, and over ranks. See `grad_sq_norm`."""
    parallel = policy.parallel
    rest, experts = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    if reduced and is_sharded(policy):  # each rank sums its own share
        spans = held(policy)
        for name, parameter in policy.trained_parameters():
            if moe.is_expert(parameter) or counted_here(parameter, parallel):
                rest += sum_of(name, main_grad(parameter).flatten()[spans[parameter]])
        dist.all_reduce(rest)
        return float(rest)
    for name, parameter in policy.trained_parameters():
        if counted_here(parameter, parallel):
            total = experts if moe.is_expert(parameter) else rest
            total += sum_of(name, main_grad(parameter).flatten())
    all_reduce(rest, parallel.model_group)
    if policy.transformer_config.num_moe_experts:
        all_reduce(experts, parallel.block_group)
    return float(rest + experts)


class PolicyOptimizer:
    """megatron-core's Adam (decoupled weight decay) or SGD, with fp32 masters of bf16 weights.

    Create it after the weights are loaded: the constructor copies the masters from them.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.config = config
        self._policy = policy
        options = MegatronOptimizerConfig(
            optimizer=config.name,
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            sgd_momentum=config.sgd_momentum,
            params_dtype=policy.transformer_config.params_dtype,
            bf16=policy.transformer_config.bf16,
            use_distributed_optimizer=is_sharded(policy),
            clip_grad=0.0,  # `clip` does it in fp64
        )
        with cpu.cuda_type_names():
            self._optimizer = get_megatron_optimizer(options, policy.chunks, use_gloo_process_groups=False)
        for part in self._optimizer.chained_optimizers:
            part.init_state_fn = part.init_state_fn or _zero_momentum
        self._state = HostState(self._optimizer.chained_optimizers, policy.parallel.device)

    def offload(self) -> None:
        """With `optimizer.offload` "sampling", move masters and moments to host memory until the next `step`."""
        if self.config.offload == "sampling":
            self._state.to_host()

    def clip(self, sq_norm: float) -> float:
        """Scale the gradient by min(1, clip_grad / norm) and return the factor; 1 if clipping is off.

        Raises:
            BrokenStepError: the norm is NaN or infinite, so that a step would destroy the weights.
        """
        if not math.isfinite(sq_norm):
            raise BrokenStepError(f"the squared gradient norm is {sq_norm}: the step would destroy the weights")
        norm = math.sqrt(sq_norm)
        if not self.config.clip_grad or norm <= self.config.clip_grad:
            return 1.0
        factor = self.config.clip_grad / norm
        for chunk in self._policy.chunks:
            chunk.scale_gradients(factor)
        return factor

    def step(self, lr: float) -> None:
        """Update the weights from `main_grad` with this learning rate; norm weights do not decay. Collective.

        Raises:
            BrokenWeightsError: a weight is not finite now.
        """
        self._state.to_device()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        # Not optimizer.step(): it would measure the norm again, in fp32.
        found_inf = self._optimizer.prepare_grads()
        assert not found_inf, "megatron-core checks for infinities only under a loss scale, and none is in use"
        self._optimizer.step_with_ready_grads()
        # The step made main_grad the `grad` of each weight; the next backward would add to it a second time.
        self._optimizer.zero_grad()
        trained = self._policy.trained_parameters()
        largest = [torch.linalg.vector_norm(weight.detach(), math.inf) for _, weight in trained]
        broken = torch.stack(largest).isfinite().logical_not().sum()
        dist.all_reduce(broken)
        if broken:
            what = "weights are not finite after an update, and are not saved; the gradient was finite"
            raise BrokenWeightsError(f"{what}: lower optimizer.lr, or check optimizer.adam_eps, and resume")

    def sharded_state_dict(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """fp32 masters and moments for megatron-core's distributed checkpoints, to save or to load into.

        The format is the same with and without the distributed optimizer. Moments are created if no step has made them
        yet. Offloaded state is given where it is, in host memory. Each tensor is cut like its weight in `model_state`,
        the policy's sharded state dict.
        """
        parts = self._optimizer.chained_optimizers
        if isinstance(parts[0], DistributedOptimizer):
            return sharded_state(parts, model_state)
        state = self._optimizer.sharded_state_dict(model_state, is_loading=True)
        for part, own in zip(parts, [state] if len(parts) == 1 else state.values(), strict=True):
            if isinstance(part.optimizer, torch.optim.Adam):
                _count_from_zero(part.optimizer, own.get("optimizer", own)["state"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a `sharded_state_dict` that a checkpoint was loaded into."""
        self._state.to_device()
        parts = self._optimizer.chained_optimizers
        if isinstance(parts[0], DistributedOptimizer):
            load_sharded_state(parts, state)
        else:
            for part, own in zip(parts, [state] if len(parts) == 1 else state.values(), strict=True):
                inner = own.get("optimizer", own)
                take_rates(inner["param_groups"], part.param_groups)
                if self.config.name == "adam":
                    _take_form(part.optimizer, inner)
            self._optimizer.load_state_dict(state)


def _count_from_zero(adam: torch.optim.Adam, stored: dict[Any, Any]) -> None:
    """Add the step count to an Adam that has not stepped; megatron-core creates and stores only its moments."""
    for parameter in adam.state.values():
        parameter.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
    stored.setdefault("common_step", torch.tensor(0.0, dtype=torch.float32))


def _take_form(adam: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Give a stored state the form of this implementation of Adam: torch's and Transformer Engine's count differently.

    Each would miss the other's count and settings, such as `bias_correction`.
    """
    count = stored_count(stored)
    for group in stored["param_groups"]:
        for own in adam.param_groups[:1]:
            group.update({key: own[key] for key in own.keys() - group.keys()})
    if isinstance(adam, torch.optim.Adam):
        stored["state"]["common_step"] = torch.tensor(count, dtype=torch.float32)
        return
    stored["state"].pop("common_step", None)
    for group in stored["param_groups"]:
        group["step"] = int(count)


def _zero_momentum(optimizer: torch.optim.Optimizer, _config: object = None) -> None:
    """Create SGD's state before its first step, to load into; megatron-core does this only for Adam."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
