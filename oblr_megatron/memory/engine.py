"""Memory of a vLLM engine on each of its devices, predicted before it starts. Imports no torch.

    memory = engine_bytes(hf_config, config, device_bytes=80 * 10**9)
    memory.kv_tokens, memory.asleep(config.rollout.sleep_level)

vLLM takes the share `gpu_memory_utilization` of a device. Its KV cache is what weights and working memory leave of this
share (`gpu_worker.determine_available_memory`). Working memory is estimated: the activations of one step's tokens, the
sampler's logits, and the typical value `RESIDENT`. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from oblr_megatron.checks.lengths import max_model_len
from oblr_megatron.checks.vllm_options import cache_bytes
from oblr_megatron.config import Config, ParallelConfig
from oblr_megatron.errors import UserError
from oblr_megatron.memory.buffer_sizes import BUCKET_BYTES, PIECE_BYTES, cpu_step_tokens
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.padding import VOCABULARY_MULTIPLE, padded_vocab_size

CONTEXT = 2 * 2**30  # CUDA context, NCCL and cuBLAS of a trainer rank; typical, not yet measured on a GPU
RESIDENT = 2 * 2**30  # CUDA context, NCCL buffers, CUDA graphs: what a sleeping engine still holds
LARGE_DEVICE = 70 * 2**30  # from this size on vLLM computes more tokens per step (`get_batch_defaults`)
STEP_TOKENS = {False: 8192, True: 16384}
LOGIT_COPIES = 3  # fp32 logits, their softmax, the sampler's sorted copy


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one device of an engine.

    Example, Qwen3-8B on two devices of 80 GB at gpu_memory_utilization 0.5, in GiB:
        EngineMemory(weights=7.6, kv_cache=26.4, other=3.3, kv_bytes_per_token=73728)
    """

    weights: int
    kv_cache: int  # 0 if nothing is left for it
    other: int  # working memory, CUDA context and graphs
    kv_bytes_per_token: int

    @property
    def total(self) -> int:
        """Bytes while the engine samples."""
        return self.weights + self.kv_cache + self.other

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, prompts included."""
        return self.kv_cache // self.kv_bytes_per_token

    def asleep(self, level: int) -> int:
        """Bytes that stay on the device at `rollout.sleep_level`: all at level 0, else what vLLM cannot free."""
        return min(RESIDENT, self.other) if level else self.total


def engine_bytes(hf_config: Mapping[str, Any], config: Config, *, device_bytes: int | None) -> EngineMemory:
    """The memory of an engine on each of its `rollout.tensor_parallel_size` devices, of `device_bytes` each.

    `device_bytes` is None for a CPU engine, which has a cache of `rollout.kv_cache_gib`.
    """
    sizes = engine_sizes(hf_config, config)
    weights = _weight_bytes(sizes, config)
    per_token = 2 * sizes.layers * sizes.kv * cache_bytes(config.rollout.vllm, sizes.element)
    if device_bytes is None:
        work = _work_bytes(sizes, config, cpu_step_tokens(max_model_len(config), config.rollout.max_num_seqs))
        return EngineMemory(weights, int(config.rollout.kv_cache_gib * 2**30), work, per_token)
    other = RESIDENT + _work_bytes(sizes, config, STEP_TOKENS[device_bytes >= LARGE_DEVICE])
    share = int(device_bytes * config.rollout.gpu_memory_utilization)
    return EngineMemory(weights, max(0, share - weights - other), other, per_token)


def engines_of_a_rank(config: Config, world_size: int, *, on_gpu: bool) -> Fraction:
    """Engines that count for a rank. A GPU holds its part of one. CPU ranks share the machine with all engines."""
    return Fraction(1) if on_gpu else Fraction(config.rollout.engines(world_size, on_gpu=False), world_size)


def outside_training(
    hf_config: Mapping[str, Any], config: Config, world_size: int, device_bytes: int, *, on_gpu: bool
) -> int:
    """Bytes of a rank's memory that a training step cannot use: `device_bytes_held`, and its engines (asleep)."""
    context = device_bytes_held(hf_config, config, on_gpu=on_gpu)
    if not config.rollout.own_engines:
        return context
    engine = engine_bytes(hf_config, config, device_bytes=device_bytes if on_gpu else None)
    held = engine.asleep(config.rollout.sleep_level if on_gpu else 0)
    return context + ceil(held * engines_of_a_rank(config, world_size, on_gpu=on_gpu))


def device_bytes_held(hf_config: Mapping[str, Any], config: Config, *, on_gpu: bool) -> int:
    """Bytes that a trainer's GPU always holds: its CUDA context and, with servers, the buckets of pushes (rank 0)."""
    if not on_gpu:
        return 0
    if not config.rollout.servers or config.rollout.only:
        return CONTEXT
    return CONTEXT + server_push_bytes(hf_config, config)


def server_push_bytes(hf_config: Mapping[str, Any], config: Config) -> int:
    """Bytes of the two buckets of pushes to servers: one fills while the other is sent."""
    return 2 * max(BUCKET_BYTES, _largest_tensor(hf_config, config))


def _largest_tensor(hf_config: Mapping[str, Any], config: Config) -> int:
    """Bytes of the largest tensor of a push."""
    sizes = engine_sizes(hf_config, config)
    return int(max(hf_config["vocab_size"], 2 * hf_config["intermediate_size"]) * sizes.hidden * sizes.element)


def push_bytes(hf_config: Mapping[str, Any], config: Config) -> int:
    """Bytes on a trainer's GPU during a push by CUDA IPC: vLLM's buffer, the gathered piece, and a tensor's copy.

    A restarted engine is wholly awake; in other pushes the KV cache sleeps.
    """
    largest = _largest_tensor(hf_config, config)
    return max(BUCKET_BYTES, largest) + gather_bytes(hf_config, config) + largest


def gather_bytes(hf_config: Mapping[str, Any], config: Config, piece_bytes: int = PIECE_BYTES) -> int:
    """Bytes of the largest piece that a trainer's rank gathers during a push (`weights/pieces.py`).

    If a layer is cut into several pieces, the result is too high by less than one parameter of a piece.
    """
    sizes, parallel = engine_sizes(hf_config, config), config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    etp, stages = parallel.expert_tensor_parallel_size or tp, parallel.pipeline_model_parallel_size
    hidden, head, heads = sizes.hidden, sizes.head_dim, sizes.head_norms // 2
    query, keys = hf_config["num_attention_heads"] * head, hf_config["num_key_value_heads"] * head
    biases = query + 2 * keys if sizes.qkv_bias else 0
    vocabulary = padded_vocab_size(hf_config["vocab_size"], config.model.make_vocab_size_divisible_by, tp) * hidden
    copied = [sizes.experts * hidden * tp] + [hidden * tp] * 2 + [heads * tp] * 2  # what every rank holds whole
    dense = [(query + 2 * keys) * hidden, query * hidden, biases, *copied]
    if not sizes.experts:
        dense += [2 * hf_config["intermediate_size"] * hidden, hf_config["intermediate_size"] * hidden]
    one = ep * hidden * (hf_config["moe_intermediate_size"] if sizes.experts else 0)  # fc2 of one expert a rank
    experts = [2 * one, one] * (sizes.experts // ep)
    budget = max(piece_bytes // sizes.element, vocabulary, *dense, *experts)
    groups = [[vocabulary], dense] if tp * stages > 1 else []
    groups += [experts] if ep * etp * stages > 1 else []
    return max((min(sum(group), budget) for group in groups), default=0) * sizes.element


def check_cache(engine: EngineMemory, config: Config) -> None:
    """Refuse an engine with a KV cache below one sequence.

    Raises:
        UserError: with both sizes.
    """
    longest = max_model_len(config)
    if engine.kv_tokens < longest:
        raise UserError(
            f"an engine's KV cache holds {engine.kv_tokens:,} tokens, but one sequence has up to {longest:,}: weights "
            f"take {engine.weights / 1e9:.1f} GB and the rest {engine.other / 1e9:.1f} GB of its "
            f"{engine.total / 1e9:.1f} GB per device",
            where="config: rollout",
            fix="raise rollout.gpu_memory_utilization or tensor_parallel_size (on a CPU kv_cache_gib)",
        )


def engine_sizes(hf_config: Mapping[str, Any], config: Config) -> RankSizes:
    """Widths on one device of an engine. vLLM splits layers like megatron-core, but pads the vocabulary less."""
    width = config.rollout.tensor_parallel_size
    model = {
        "dtype": "bfloat16" if config.engine_dtype == "bfloat16" else "float32",
        "make_vocab_size_divisible_by": max(1, VOCABULARY_MULTIPLE // width),
    }
    layout = ParallelConfig(tensor_model_parallel_size=width)
    engine = config.model_copy(update={"parallel": layout, "model": config.model.model_copy(update=model)})
    return RankSizes.of(hf_config, engine, stage=0)


def _weight_bytes(sizes: RankSizes, config: Config) -> int:
    """Bytes of the weights. FP8 rounds only the matrices of the layers, not embedding, output layer, norms and routers.

    If there are fewer key heads than devices, every device holds a copy of one.
    """
    copied = (sizes.query + 2 * sizes.kv - sizes.qkv_weight) * sizes.hidden * sizes.layers
    parameters = sizes.parameters + copied
    if config.rollout.quantization == "none":
        return parameters * sizes.element
    rounded = sizes.layer_weights + copied
    return (parameters - rounded) * sizes.element + rounded


def _work_bytes(sizes: RankSizes, config: Config, tokens: int) -> int:
    """Bytes of one layer's activations for a step's tokens, and of the sampler's logits."""
    feed_forward = 3 * sizes.ffn
    if sizes.experts:  # two workspaces of the fused kernel, for every expert of a token
        feed_forward = sizes.top_k * (max(2 * sizes.expert_ffn, sizes.hidden) + sizes.expert_ffn)
    widest = max(sizes.query + 2 * sizes.kv + sizes.query, feed_forward)
    layer = tokens * (3 * sizes.hidden + widest) * sizes.element
    return layer + LOGIT_COPIES * config.rollout.max_num_seqs * sizes.columns * sizes.tp * 4
