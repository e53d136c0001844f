"""The same norms and clipped sum by Opacus, on one rank: transformers' Qwen3 with torch's RMSNorm."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblr_megatron.norms import TokenBatch
from oblr_megatron.weights.names import ModelShape, entry, views

HF = Qwen3Config(
    vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)  # fmt: skip


def whole(model: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """One tensor for each parameter, put together from all ranks, by Hugging Face name."""
    found: dict[str, Tensor] = {}
    shape = ModelShape.of(HF)
    for name, param in model.named_parameters():
        shards = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, tensor_of(param).contiguous())
        item = entry(name, shape)
        merged = views(item, torch.stack(shards), shape)
        found |= {own: view.reshape(size) for (own, view), size in zip(merged, item.shapes, strict=True)}
    return found


def by_opacus(weights: dict[str, Tensor], batch: TokenBatch, limit: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared norms [n], and the sum of the gradients clipped to `limit`, by Hugging Face name."""
    model = Qwen3ForCausalLM(HF).double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Qwen3RMSNorm":  # its own computes in fp32
                setattr(module, name, nn.RMSNorm(child.weight.shape, HF.rms_norm_eps, dtype=torch.float64))
    model.load_state_dict(weights)
    sampler = GradSampleModule(model, loss_reduction="sum")
    logprobs = sampler(input_ids=batch.input_ids, use_cache=False).logits.log_softmax(-1)
    (-batch.per_sample(logprobs.gather(-1, batch.labels[..., None])[..., 0])).sum().backward()
    grads = {name: param.grad_sample for name, param in model.named_parameters()}
    norms = torch.stack([grad.flatten(1).square().sum(1) for grad in grads.values()]).sum(0)
    clips = (limit / norms.sqrt()).clamp(max=1)
    return norms, {name: torch.tensordot(clips, grad, 1) for name, grad in grads.items()}
