"""Count the collective messages of a push's gather, and time it, on a few gloo ranks of this machine.

    python tools/bench/push_messages.py                       # Qwen3-30B-A3B's counts and a dense model: a minute
    python tools/bench/push_messages.py --layers 4 --dense-layers 2 --rounds 1

The mixture has Qwen3-30B-A3B's 48 layers of 128 experts with tiny matrices (hidden 32, 16 rows an expert), in fp32: its
time is that of messages. The dense model has Qwen3-0.6B's layers and a vocabulary of 4,096, in bf16: its time is that
of bytes. Every rank takes all tensors of `MegatronWeights.views()` and copies nothing, as a rank without an engine.

`messages` counts the collectives of rank 0; `a_layer` is their number within the layers / number of layers. gloo sends
one broadcast for each rank of a group where NCCL runs one all-gather. `seconds` is the median over rounds, to the last
rank's end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import publish
from shapes import randomize
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3Config, Qwen3MoeConfig

from oblr_megatron.config import ModelConfig, ParallelConfig
from oblr_megatron.model.parallel import initialize, shutdown
from oblr_megatron.model.policy import build_policy
from oblr_megatron.weights.export import MegatronWeights

LAYOUTS = {  # name -> (mixture or dense, ranks, sizes)
    "mixture, ep2": (True, 2, {"expert_model_parallel_size": 2}),
    "mixture, tp2 ep2": (
        True,
        2,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
    ),
    "mixture, pp2 ep2": (True, 4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "dense, tp2": (False, 2, {"tensor_model_parallel_size": 2}),
    "dense, pp2": (False, 2, {"pipeline_model_parallel_size": 2}),
}
COMMON: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One layout. Example: Row(layout="mixture, ep2", tensors=18867, megabytes=41.1, messages=96, a_layer=2.0,
    rounds=3, seconds=0.4)"""

    layout: str
    tensors: int
    megabytes: float  # 10^6, of all tensors together
    messages: int
    a_layer: float
    rounds: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--layers", type=int, default=48, help="number of layers of the mixture")
    parser.add_argument("--dense-layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in options.layouts:
            out = Path(directory) / f"{name}.json"
            spawn(_rank, (name, out, options), nprocs=LAYOUTS[name][1])
            rows.append(Row(**json.loads(out.read_text())))
    publish(rows, "messages of a push", options.json)


def _rank(rank: int, name: str, out: Path, options: argparse.Namespace) -> None:
    mixture, ranks, sizes = LAYOUTS[name]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}.store", ranks), rank=rank, world_size=ranks)
    parallel = initialize(ParallelConfig.model_validate(sizes))
    hf_config = _mixture(options.layers) if mixture else _dense(options.dense_layers)
    model = {"path": "unused", "dtype": "float32" if mixture else "bfloat16", "transformer_impl": "local"}
    policy = build_policy(hf_config, ModelConfig.model_validate(model), parallel)
    randomize(policy.named_parameters())
    weights = MegatronWeights(policy)
    with CommDebugMode() as counted:
        metadata = [(tensor.numel() * tensor.element_size(), name) for name, tensor in weights.views()]
    messages = sum(counted.get_comm_counts().values())
    outside = len([name for _, name in metadata if ".layers." not in name])
    sent = (parallel.tp_size if parallel.tp_size > 1 else 0) + (parallel.pp_size > 1)  # embedding, norm, output layer
    times = [_seconds(weights) for _ in range(options.rounds)]
    if rank == 0:
        row = Row(
            layout=name,
            tensors=len(metadata),
            megabytes=sum(num_bytes for num_bytes, _ in metadata) / 1e6,
            messages=messages,
            a_layer=(messages - outside * sent) / hf_config.num_hidden_layers,
            rounds=options.rounds,
            seconds=statistics.median(times),
        )
        out.write_text(json.dumps({field: getattr(row, field) for field in Row.__slots__}))
    dist.barrier()
    shutdown()


def _seconds(weights: MegatronWeights) -> float:
    """One pass over all tensors, from all ranks' begin to the last rank's end."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in weights.views():
        pass
    dist.barrier()
    return time.perf_counter() - begin


def _mixture(layers: int) -> Qwen3MoeConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return Qwen3MoeConfig(num_hidden_layers=layers, **COMMON | sizes | experts)


def _dense(layers: int) -> Qwen3Config:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 4096}
    return Qwen3Config(num_hidden_layers=layers, **COMMON | heads | sizes)


if __name__ == "__main__":
    main()
