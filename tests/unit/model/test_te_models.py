"""Transformer Engine's layers of every layout preset, built on meta devices: taps, rules and names.

The models are those of a run on GPUs: `build_policy` with Transformer Engine's specs, the taps and megatron-core's
data-parallel wrapper. Only memory is missing. The oracle is the same model from megatron-core's own layers: each
Hugging Face tensor must have the same rule there. Skipped without Transformer Engine (`make gpu-env`).

Not covered: forward and backward (tests/gpu); what `HandOver` does with factors (test_te_taps.py); which replicas an
expert's tokens come from, which ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from oblr_megatron.checks.machine import Machine
from oblr_megatron.config import Config, load_config
from oblr_megatron.memory.pass_plan import needs_single_samples
from oblr_megatron.model import moe, precision, te_taps
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.model.precision import this_machine
from oblr_megatron.model.transformer_config import HFConfig, hf_config_of
from oblr_megatron.norms.rules import Kind, classify
from oblr_megatron.norms.two_pass import rules_need_single_samples
from oblr_megatron.preflight.examine import model_of
from oblr_megatron.preflight.fake_ranks import META, standing_as
from oblr_megatron.preflight.models import rank_positions
from oblr_megatron.weights.names import ModelShape, entry, shard_shape, table
from tools.dry_run_presets import PER_NODE, PRESETS, nodes_of

ALL = sorted(path.stem for path in PRESETS.glob("*.toml"))
ENGINE = this_machine().transformer_engine
NORMS = ("norm.weight", "layernorm.weight")
ROUTER = "mlp.gate.weight"

pytestmark = pytest.mark.skipif(ENGINE is None, reason="needs Transformer Engine (make gpu-env)")


@pytest.fixture(autouse=True)
def described_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Hopper GPUs, as far as our code asks. Ranks of a fake group cannot tell each other anything."""
    machine = Machine((9, 0), torch.version.cuda, ENGINE)
    for module in (precision, te_taps):
        monkeypatch.setattr(module, "this_machine", lambda: machine)
    monkeypatch.setattr(moe, "_senders", lambda dispatcher, _: list(range(dispatcher.tp_ep_group.size())))


def preset(name: str) -> tuple[Config, HFConfig, int]:
    """(config, model, number of ranks)."""
    path = PRESETS / f"{name}.toml"
    config = load_config(path)
    values, _ = model_of(config.model.path)
    return config, hf_config_of(values), nodes_of(path) * PER_NODE


def policies(name: str, impl: str, ends: tuple[int, int] = (0, -1)) -> Iterator[tuple[int, Policy]]:
    """(end, the policy of the first or the last rank of a pipeline stage), for each stage."""
    config, hf_config, world_size = preset(name)
    places = rank_positions(config.parallel, world_size)
    model = config.model.model_copy(update={"transformer_impl": impl})
    for end in ends:
        for stage in range(config.parallel.pipeline_model_parallel_size):
            rank = [rank for rank, place in enumerate(places) if place.pp == stage][end]
            with standing_as(rank, world_size, config.parallel) as parallel:
                with on_gpus() if impl == "transformer_engine" else nullcontext():
                    policy = build_policy(hf_config, model, on_device(parallel, impl), config.parallel)
                yield end, policy


class OnMeta(TorchFunctionMode):
    """Creates on the meta device what is asked for on GPUs."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if isinstance(device, int) or "cuda" in str(device):
            options["device"] = META
        return function(*(META if isinstance(arg, torch.device) else arg for arg in args), **options)


@contextmanager
def on_gpus() -> Iterator[None]:
    """A machine with GPUs, as far as Transformer Engine's modules ask when they are built.

    They do not initialise what they are asked to create on the meta device, and so set no marks on it.
    """
    with pytest.MonkeyPatch.context() as patch, OnMeta():
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        yield


def on_device(parallel: Parallel, impl: str) -> Parallel:
    """Transformer Engine's layers are for ranks with GPUs; megatron-core's own mixtures for ranks without."""
    return replace(parallel, device=torch.device("cuda") if impl == "transformer_engine" else META)


def rules(policy: Policy) -> dict[str, tuple[Kind, bool]]:
    """(kind, whether tapped) by the names of the Hugging Face tensors."""
    shape = ModelShape.of(policy.hf_config)
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    return {
        tensor: (rule.kind, rule.tapped)
        for rule in classify(policy)
        for tensor in entry(names[id(rule.param)], shape).hf
    }


def kinds(found: dict[str, tuple[Kind, bool]]) -> dict[str, Kind]:
    return {tensor: kind for tensor, (kind, _) in found.items()}


@pytest.mark.parametrize("name", ALL)
def test_layers_are_tapped_and_have_the_rules_of_megatron_cores_own(name: str) -> None:
    """Transformer Engine's norms have no tap: autograd makes their gradients. Nor has a router."""
    hf_config, own = preset(name)[1].to_dict(), [rules(policy) for _, policy in policies(name, "local")]
    for (_, policy), expected in zip(policies(name, "transformer_engine"), own, strict=True):
        assert types_of(policy) >= {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
        found = rules(policy)
        assert rules_need_single_samples(classify(policy)) is needs_single_samples(hf_config, transformer_engine=True)
        assert kinds(found) == kinds(expected)
        untapped = {tensor for tensor, (_, tapped) in found.items() if not tapped}
        assert untapped == {tensor for tensor in found if tensor.endswith((*NORMS, ROUTER))}


@pytest.mark.parametrize("name", ALL)
def test_names_and_shapes_are_those_of_the_table(name: str) -> None:
    """The stages together hold every tensor once, less the experts of other expert-parallel ranks."""
    config, hf_config, _ = preset(name)
    shape, parallel = ModelShape.of(hf_config), config.parallel
    held: dict[int, list[str]] = {0: [], -1: []}
    for end, policy in policies(name, "transformer_engine"):
        for parameter_name, parameter in policy.named_parameters():
            item = entry(parameter_name, shape)
            tp_size = policy.parallel.tp_size if item.expert is None else policy.parallel.etp_size
            size = shard_shape(item, shape, tp_size=tp_size, padded_vocab=policy.padded_vocab_size)
            assert tuple(parameter.shape) == size, parameter_name
            held[end] += item.hf
    of_a_rank = shape.experts // parallel.expert_model_parallel_size
    for end, tensors in held.items():
        first = 0 if end == 0 else shape.experts - of_a_rank
        here = range(first, first + of_a_rank)
        whole = [tensor for item in table(shape) if item.expert is None or item.expert in here for tensor in item.hf]
        assert sorted(tensors) == sorted(whole)


def types_of(policy: Policy) -> set[str]:
    modules: Any = (module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, nn.Module))
    return {type(module).__name__ for module in modules}
