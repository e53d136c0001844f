"""A push gathers few messages per layer; in every layout and cut, each rank receives the stored tensors bit for bit.

NCCL's all-gather runs here over gloo, which has the same call. Not covered: NCCL itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoConfig

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import Config, ModelConfig, parse_config
from oblr_megatron.memory.engine import gather_bytes
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.weights import export
from oblr_megatron.weights.export import MegatronWeights
from oblr_megatron.weights.names import layer_of
from tests.distributed.launch import layout, run_ranks
from tests.distributed.test_export import assert_same, read
from tests.tiny import make_hf_dir, make_moe_hf_dir

LAYERS = 2
KEYS = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "cp": "context"}
LAYOUTS: dict[str, dict[int, list[dict[str, Any]]]] = {
    "dense": {2: [{"tp": 2}, {"pp": 2}, {"cp": 2}], 4: [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2}]},
    "mixture": {
        2: [
            {"ep": 2},
            {"pp": 2},
            {"tp": 2, "sp": True},
            {"tp": 2, "sp": True, "ep": 2, "etp": 1},
            {"tp": 2, "sp": True, "etp": 1},
            {"cp": 2, "ep": 2},
        ],
        4: [
            {"ep": 4},
            {"tp": 2, "sp": True, "ep": 2},
            {"tp": 2, "sp": True, "ep": 4, "etp": 1},
            {"tp": 4, "sp": True, "ep": 2, "etp": 1},
            {"tp": 2, "sp": True, "cp": 2, "ep": 2, "etp": 1},
            {"pp": 2, "ep": 2},
            {"ep": 2},
        ],
    },
}
WHOLE, CUT, SINGLE = 2**29, 30_000, 1
"""Bytes of a piece: a whole layer, a part of one, one parameter."""


def run_of(sizes: dict[str, Any]) -> Config:
    """A config with the layout."""
    names = {f"{KEYS[key]}_model_parallel_size": size for key, size in sizes.items() if key in ("tp", "pp", "ep")}
    names |= {"context_parallel_size": sizes.get("cp", 1), "sequence_parallel": sizes.get("sp", False)}
    names |= {"expert_tensor_parallel_size": sizes["etp"]} if "etp" in sizes else {}
    table = {"run_dir": "unused", "model": {"path": "unused", "dtype": "float32"}, "data": {"train": "unused"}}
    return parse_config(table | {"parallel": names})


def load(path: Path, parallel: Parallel) -> Policy:
    config = ModelConfig.model_validate({"path": path, "dtype": "float32"})
    policy = build_policy(AutoConfig.from_pretrained(path), config, parallel)
    load_hf_weights(policy, path)
    return policy


def passes(source: Path, all_sizes: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    """What this rank sees in every layout and cut."""
    found = []
    export.share_rows = partial(lambda real, rows, group, _: real(rows, group, backend), export.share_rows)
    for sizes in all_sizes:
        with layout(**sizes) as parallel:
            policy = load(source, parallel)
            hf_config = policy.hf_config.to_dict()
            for piece_bytes in (WHOLE, CUT, SINGLE):
                weights = MegatronWeights(policy, piece_bytes=piece_bytes)
                declared = [tuple(meta) for meta in weights.metadata()]
                with CommDebugMode() as counted:
                    stream = [(name, tensor) for name, tensor in weights]  # all of them live at once
                assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream] == declared
                viewed = {}
                for (name, view), (_, dtype, shape) in zip(weights.views(), declared, strict=True):
                    viewed[name] = view.to(dtype).reshape(shape).clone()
                largest = max((piece.numel for piece in weights._pieces if weights._travels(piece)), default=0)
                rows = [piece for piece in weights._pieces if layer_of(piece.owners[0][0]) is not None]
                found.append(
                    {
                        "label": f"{sizes}, {piece_bytes} bytes, {backend}",
                        "stream": dict(stream),
                        "views": viewed,
                        "messages": sum(counted.get_comm_counts().values()),
                        "pieces": len(weights._pieces),
                        "pieces a layer": len(rows) / LAYERS,
                        "sizes": sizes | {"whole": piece_bytes == WHOLE, "experts": num_experts(hf_config)},
                        "predicted": gather_bytes(hf_config, run_of(sizes), piece_bytes) / (4 * largest or 1),
                        "travels": largest > 0,
                    }
                )
    assert dist.get_world_size() == parallel.world_size
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {"dense": make_hf_dir(root / "dense", tied=True), "mixture": make_moe_hf_dir(root / "mixture")}


@pytest.mark.parametrize(
    ("model", "world_size", "backend"),
    [
        *((model, size, "nccl") for model in LAYOUTS for size in (2, 4)),
        *(("dense", 2, "gloo"), ("dense", 4, "gloo"), ("mixture", 2, "gloo")),
        pytest.param("mixture", 4, "gloo", marks=pytest.mark.nightly),
    ],
)
def test_few_messages_bring_the_same_bits(model: str, world_size: int, backend: str, sources: dict[str, Path]) -> None:
    source = sources[model]
    stored = read(source)
    for rank in run_ranks(passes, world_size, source, LAYOUTS[model][world_size], backend):
        for seen in rank:
            assert_same(seen["stream"], stored)
            assert_same(seen["views"], stored)
            check_messages(seen, backend, seen["label"])
            low, high = (1.0, 1.0) if seen["sizes"]["whole"] else (1.0, 2.0)
            assert low <= seen["predicted"] <= high if seen["travels"] else seen["predicted"] == 0, seen["label"]


def check_messages(seen: dict[str, Any], backend: str, label: str) -> None:
    """One message for each piece that a group shares, one more with pipeline stages. A layer is one or two pieces."""
    sizes = seen["sizes"]
    tp, stages = sizes.get("tp", 1), int(sizes.get("pp", 1) > 1)
    shared = sizes.get("ep", 1) * sizes.get("etp", tp)
    kinds = [tp, shared] if sizes["experts"] else [tp]
    gathers = [int(size > 1) if backend == "nccl" else size * (size > 1) for size in kinds]
    outside = (2 if sizes["experts"] == 0 else 3) * (gathers[0] + stages)  # embedding, final norm, output unless tied
    if sizes["whole"]:
        assert seen["pieces a layer"] == len(kinds), label
        assert seen["messages"] == outside + LAYERS * sum(gather + stages for gather in gathers), label
        if backend == "nccl":
            assert (seen["messages"] - outside) / LAYERS <= 4, label
    else:
        assert seen["pieces a layer"] >= len(kinds), label  # a piece is at least as large as the embedding
        assert seen["messages"] <= seen["pieces"] * (max(gathers) + stages), label


def test_a_layer_over_the_budget_is_cut_at_the_same_experts_of_all_ranks(sources: dict[str, Path]) -> None:
    [rank, _] = run_ranks(order_of_experts, 2, sources["mixture"])
    assert rank[WHOLE] == [0, 1, 2, 3]
    assert rank[CUT] == [0, 2, 1, 3]


def order_of_experts(source: Path) -> dict[int, list[int]]:
    with layout(ep=2) as parallel:
        policy, found = load(source, parallel), {}
        for piece_bytes in (WHOLE, CUT):
            names = [meta.name for meta in MegatronWeights(policy, piece_bytes=piece_bytes).metadata()]
            ours = [int(name.split(".")[5]) for name in names if ".layers.1.mlp.experts." in name]
            found[piece_bytes] = list(dict.fromkeys(ours))
    return found


def test_half_precision_is_cast_before_it_is_sent(sources: dict[str, Path]) -> None:
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in read(sources["mixture"]).items()}
    for stream in run_ranks(half, 4, sources["mixture"]):
        assert_same(stream, expected)


def half(source: Path) -> dict[str, torch.Tensor]:
    with layout(pp=2, ep=2) as parallel:
        return dict(MegatronWeights(load(source, parallel), torch.bfloat16))
