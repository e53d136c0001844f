"""Norms and clipped sums of single samples' gradients for a GPTModel under TP2, against Opacus on the same layers.

    torchrun --nproc-per-node 2 examples/norms_library/norms.py        # half a minute on two CPU cores

On a machine with GPUs set CUDA_VISIBLE_DEVICES to '' first: the example is written for CPUs.

Prints the largest relative differences, about 1e-15. docs/norms_library.md explains the calls.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from opacus_qwen3 import HF, by_opacus, whole
from torch import Tensor, nn

from oblr_megatron.model import cpu
from oblr_megatron.norms import TokenBatch, clipped_grad_sum, per_sample_sq_grad_norms, tapped


def loss(logits: Tensor, batch: TokenBatch) -> Tensor:
    """Cross-entropy of each sample's counted tokens, [n]; any other per-sample loss works as well."""
    logprobs = gather_from_tensor_model_parallel_region(logits).log_softmax(-1)
    return -batch.per_sample(logprobs.gather(-1, batch.labels[..., None])[..., 0])


def build() -> GPTModel:
    """A model as any megatron-core user builds it: Qwen3's architecture, random weights, half of them on each rank."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=80,
        normalization="RMSNorm", layernorm_epsilon=HF.rms_norm_eps, qk_layernorm=True, gated_linear_unit=True,
        activation_func=nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=2, params_dtype=torch.float64, persist_layer_norm=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    rope = {"position_embedding_type": "rope", "rotary_base": 10_000}
    return GPTModel(config, spec, HF.vocab_size, 64, share_embeddings_and_output_weights=False, **rope).double()


def main() -> None:
    cpu.install()  # megatron-core asks for CUDA devices even where there are none
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    model = build()
    ids = torch.randint(2, HF.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], mask=torch.arange(16) < torch.tensor([[16], [9], [12], [5]]))
    with tapped(model) as handle:
        norms = per_sample_sq_grad_norms(handle, [batch], loss)  # [4], no gradient is formed
        limit = float(norms.sqrt().median())
        clipped_grad_sum(handle, [batch], loss, limit, mode="bookkeep")  # in .grad
    weights, gradients = whole(model, lambda p: p.detach()), whole(model, lambda p: p.grad)
    wanted, clipped = by_opacus(weights, batch, limit)
    worst = max(float((gradients[name] - grad).norm() / grad.norm()) for name, grad in clipped.items())
    if dist.get_rank() == 0:
        print(f"norms differ from Opacus by {float((norms / wanted - 1).abs().max()):.1e}, clipped sums by {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
