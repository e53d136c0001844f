"""The models of all ranks that a dry run builds: together they are the model of transformers.

Not covered: Transformer Engine's layers. Collectives of the fake process group do nothing.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from oblr_megatron.config import Config, ParallelConfig
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.training import MemoryEstimate
from oblr_megatron.model.cpu import META
from oblr_megatron.model.published import NAMES, published
from oblr_megatron.model.transformer_config import hf_config_of
from oblr_megatron.preflight.device_memory import RankMemory
from oblr_megatron.preflight.fake_ranks import standing_as
from oblr_megatron.preflight.models import Models, build_models, rank_positions
from oblr_megatron.preflight.table import RankKind, memory_table
from tests.tiny import tiny_config, tiny_config_of, tiny_moe_config
from tests.unit.configs import config_with

WORLD = 16
MIXTURES = {"Qwen3-30B-A3B": {"ep": 8, "etp": 1}, "Qwen3-235B-A22B": {"ep": 8, "etp": 1}}
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "tp": ({"tp": 2}, 0),
    "tp over more than the heads of keys": ({"tp": 4}, 0),
    "pp, tied": ({"pp": 2}, 0),
    "interleaved": ({"pp": 2, "vp": 2}, 0),
    "cp": ({"tp": 2, "cp": 2}, 0),
    "biases": ({"tp": 4, "pp": 2}, 0),
    "ep": ({"tp": 2, "ep": 4, "etp": 1}, 4),
    "ep within a replica": ({"tp": 4, "ep": 2, "etp": 1}, 4),
    "etp": ({"tp": 2, "pp": 2}, 4),
    "short ends": ({"tp": 2, "pp": 4, "ends": 1, "layers": 6}, 0),
    "short ends, interleaved": ({"pp": 2, "vp": 2, "ends": 1, "layers": 6}, 4),
}


def parallel(
    *, tp: int = 1, pp: int = 1, vp: int | None = None, cp: int = 1, ep: int = 1, etp: int | None = None, ends: int = 0
) -> Any:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": tp > 1,
        "account_for_embedding_and_loss": bool(ends),
    }


def run(sizes: dict[str, int], **model: Any) -> Config:
    return config_with(model={"dtype": "bfloat16"} | model, parallel=parallel(**sizes))


def by_transformers(hf_config: dict[str, Any]) -> int:
    """Parameters as transformers counts them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config_of(hf_config))
    return int(model.num_parameters())


def of_adapters(hf_config: dict[str, Any], rank: int, targets: list[str]) -> int:
    """Parameters of an A [rank, in] and a B [out, rank] next to every such matrix of transformers' model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config_of(hf_config))
    sizes = [one.weight.shape for name, one in model.named_modules() if name.endswith(tuple(targets))]
    experts = [one for one in model.modules() if hasattr(one, "gate_up_proj")]  # three dimensions: of all experts
    for one in experts if "down_proj" in targets else ():
        count, hidden, ffn = one.down_proj.shape
        sizes += [(hidden, ffn)] * (2 * count)  # of up and of down
    return rank * sum(out + inside for out, inside in sizes)


def check_cover(found: Models, world_size: int) -> None:
    """Every rank is in exactly one position."""
    assert sorted(rank for held in found.holdings for rank in held.ranks) == list(range(world_size))


@pytest.mark.parametrize("name", NAMES)
def test_every_published_size_is_complete(name: str) -> None:
    """TP2 x PP2 on 16 ranks. Mixtures have 4 of their layers here, and all of them nightly (test_layout_presets.py)."""
    config = run({"tp": 2, "pp": 2, **MIXTURES.get(name, {})})
    hf_config = published(name) | ({"num_hidden_layers": 4} if name in MIXTURES else {})
    found = build_models(hf_config, config, WORLD)
    check_cover(found, WORLD)
    assert found.total == by_transformers(hf_config)


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str) -> None:
    """The parameters of every rank match the memory model; together they are the model."""
    sizes, experts = LAYOUTS[case]
    make = tiny_moe_config if experts else tiny_config
    if "biases" in case:
        make = partial(tiny_config_of, "qwen2")
    layers = sizes.get("layers", 4)
    hf_config = make(num_hidden_layers=layers, tie_word_embeddings="tied" in case, vocab_size=1000).to_dict()
    layout = {name: size for name, size in sizes.items() if name != "layers"}
    shared_experts = experts and sizes.get("etp", sizes.get("tp", 1)) > 1  # adapters of which are refused
    targets = ["o_proj"] if shared_experts else ["o_proj", "up_proj", "down_proj"]
    config = run(layout, lora={"rank": 3, "targets": targets})
    found = build_models(hf_config, config, WORLD)
    check_cover(found, WORLD)
    assert found.total == by_transformers(hf_config)
    assert found.trained == of_adapters(hf_config, 3, targets)
    for held in found.holdings:
        counted = RankSizes.of(hf_config, config, held.position.pp)
        assert (held.dense, held.experts) == (counted.dense_parameters, counted.expert_parameters)
        assert held.trained == counted.adapter_parameters


def test_positions_match_megatrons_groups() -> None:
    """A sample of 1,024 ranks: the computed position and the created groups."""
    sizes = {"tp": 4, "pp": 4, "cp": 2, "ep": 16, "etp": 2}
    config = ParallelConfig(**parallel(**sizes))
    places = rank_positions(config, 1024)
    assert len(places) == 1024
    for rank in (0, 341, 1023):
        with standing_as(rank, 1024, config) as own:
            place = places[rank]
            stands = (own.tp_rank, own.pp_rank, own.cp_rank, own.dp_rank, own.ep_rank, own.etp_rank)
            assert stands == (place.tp, place.pp, place.cp, place.dp, place.ep, place.etp)
            same_experts = parallel_state.get_expert_data_parallel_group()
            assert dist.get_process_group_ranks(same_experts)[0] == place.expert_peers
            peers = [
                other for other, at in enumerate(places) if (at.pp, at.cp, at.dp) == (place.pp, place.cp, place.dp)
            ]
            assert dist.get_process_group_ranks(own.tp_group) == peers
            block = [other for other, at in enumerate(places) if at.dp // 4 == place.dp // 4]  # 16 x 2 over 4 x 2
            assert own.block_size == 4 and dist.get_process_group_ranks(own.block_group) == block


def test_nothing_is_left_behind() -> None:
    current, move = torch.cuda.current_device, torch.Tensor.cuda
    with standing_as(3, 8, ParallelConfig(tensor_model_parallel_size=2)) as own:
        inside = torch.cuda.current_device
        assert own.device == META and dist.get_rank() == 3 and dist.get_world_size() == 8
        assert torch.empty(1).device == META and inside is not current
    assert not dist.is_initialized() and torch.empty(1).device.type == "cpu"
    assert torch.cuda.current_device is not inside and move.__name__ == torch.Tensor.cuda.__name__


def test_parts_that_the_first_stage_lacks_are_listed_with_their_kind() -> None:
    """Logits belong to training, and stand before the engine's parts."""
    sizes = dict.fromkeys(("weights", "main_grad", "fold_sums", "optimizer", "activations", "norms", "work"), 1)
    engine: Any = SimpleNamespace(total=4, weights=1, other=1, kv_cache=2, kv_tokens=9, asleep=lambda level: 1)
    kinds = []
    for stage, logits in enumerate((0, 5)):
        step = MemoryEstimate(**sizes, logits=logits, checkpoint=0, fixed=1, stage=stage, moment="the loss")
        kinds.append(RankKind((stage,), (stage,), 7, 7, RankMemory(step, engine, sleep_level=1, context=1, push=1)))
    names = [str(name) for name in memory_table(kinds, None).columns[0].cells]
    assert names.index("activations") < names.index("logits") < names.index("while training") < names.index("KV cache")
