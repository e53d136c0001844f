"""A mixture of experts: norms and gradient are the oracle's in every expert layout, fp64, relative 1e-10.

Where replicas share experts (EP x ETP above TP x CP), an expert's gradient mixes their samples. Only `two_pass` works
there: it tells samples apart by the dispatcher's order. Elsewhere every mode works. With routing replay the oracle
takes the same routes. On several ranks a layout has every second mode, without or with replay, and lets half of its
modes stream, in turn; the nightly tests run every mode, also streamed, in every layout.

Not covered: Transformer Engine's grouped experts, CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from oblr_megatron.config import Config
from oblr_megatron.data.packing import one_per_microbatch
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.reference import Reference
from oblr_megatron.norms.oracle import oracle_logprobs
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import whole_step
from tests.distributed.adapters import LORA
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import with_routes
from tests.distributed.test_gradnorm_modes import (
    GROUP,
    NIGHTLY,
    PROMPTS,
    RTOL,
    check,
    config_of,
    expected,
    make_samples,
    policy_of,
    scored,
    steps_of,
)
from tests.tiny import make_moe_hf_dir

MODES = {name: {"mode": name} for name in ("two_pass", "stash", "bookkeep", "inline")}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "ep2": {"ep": 2},
        "tp2sp": {"tp": 2, "sp": True},
        "tp2sp ep2": {"tp": 2, "sp": True, "ep": 2, "etp": 1},
        "tp2sp etp1": {"tp": 2, "sp": True, "etp": 1},  # whole experts on both tensor-parallel ranks
        "pp2": {"pp": 2},
        "cp2": {"cp": 2},  # whole experts on both ranks of a sequence
        "cp2 ep2": {"cp": 2, "ep": 2},
    },
    4: {
        "ep4": {"ep": 4},
        "tp2sp ep2": {"tp": 2, "sp": True, "ep": 2},
        "tp2sp ep4": {"tp": 2, "sp": True, "ep": 4, "etp": 1},  # across tensor- and data-parallel ranks
        "tp4sp ep2": {"tp": 4, "sp": True, "ep": 2, "etp": 1},  # on half of a replica's ranks
        "pp2 ep2": {"pp": 2, "ep": 2},
        "ep2 dp4": {"ep": 2},
    },
}


ALL_AXES: dict[str, dict[str, Any]] = {  # on eight ranks
    "tp2sp pp2 cp2 ep2": {"tp": 2, "sp": True, "pp": 2, "cp": 2, "ep": 2},
    "tp2sp pp2 cp2 ep4": {"tp": 2, "sp": True, "pp": 2, "cp": 2, "ep": 4, "etp": 1},
    "tp2sp pp2 ep4 dp2": {"tp": 2, "sp": True, "pp": 2, "ep": 4, "etp": 1},
    "pp2 cp2 ep4 dp2": {"pp": 2, "cp": 2, "ep": 4},
}


REPLAYED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"pp2": {"pp": 2}, "cp2": {"cp": 2}},
    4: {"tp2sp ep4": {"tp": 2, "sp": True, "ep": 4, "etp": 1}},
}


ADAPTED = {  # experts that no two tensor-parallel ranks share, and whole groups of heads
    world: {
        name: sizes for name, sizes in of.items() if sizes.get("etp", sizes.get("tp", 1)) == 1 and name[:3] != "tp4"
    }
    for world, of in LAYOUTS.items()
}


def on_ranks(
    path: str, layouts: dict[str, dict[str, Any]], turn: int | None, replay: bool = False, lora: bool = False
) -> dict[tuple[str, str], dict[str, Any]]:
    """Steps by name of the layout and mode; `turn` chooses the modes and those that stream; None: all."""
    results: dict[tuple[str, str], dict[str, Any]] = {}

    def config(gradnorm: dict[str, Any]) -> Config:
        packing, adapters = "packed" if replay else "rows", LORA if lora else None
        return config_of(path, gradnorm, folds=4, replay=replay, lora=adapters, packing=packing)

    for place, (name, sizes) in enumerate(layouts.items()):
        now = None if turn is None else turn + place
        with layout(**sizes) as parallel:
            every = now is None or (parallel.world_size == 1 and not lora)
            some = list(MODES) if every else list(MODES)[now % 2 :: 2]
            names = some if parallel.block_size == 1 else ["two_pass"]
            modes = {mode: MODES[mode] for mode in names}
            steps = steps_of(path, parallel, modes, config, now, again=name == "one")
            results |= {(name, mode): step for mode, step in steps.items()}
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_moe_hf_dir(tmp_path_factory.mktemp("moe"), seed=7, dtype=torch.float64))


@NIGHTLY
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_mode_is_the_oracles_step(model: str, world_size: int, nightly: bool) -> None:
    """All experts on four replicas, which adds nothing to two, are nightly."""
    turn = None if nightly else world_size // 2
    layouts = {name: sizes for name, sizes in LAYOUTS[world_size].items() if nightly or name != "ep4"}
    check(expected(model), run_ranks(on_ranks, world_size, model, layouts, turn))


@pytest.mark.nightly
@pytest.mark.parametrize("replay", [False, True])
def test_every_axis_of_parallelism_at_once(model: str, replay: bool) -> None:
    """Replay means packed rows, too."""
    check(expected(model, replay=replay), run_ranks(on_ranks, 8, model, ALL_AXES, None, replay))


@pytest.mark.parametrize(
    ("world_size", "nightly"),
    [(1, False), (2, False), *(pytest.param(n, True, marks=pytest.mark.nightly) for n in REPLAYED)],
)
def test_every_mode_replays_routes(model: str, world_size: int, nightly: bool) -> None:
    turn = None if nightly else world_size
    check(expected(model, replay=True), run_ranks(on_ranks, world_size, model, REPLAYED[world_size], turn, True))


@pytest.mark.parametrize(
    ("world_size", "everyday"),
    [(1, True), (2, True), *(pytest.param(n, False, marks=pytest.mark.nightly) for n in ADAPTED)],
)
def test_every_mode_of_experts_adapters(model: str, world_size: int, everyday: bool) -> None:
    """Every matrix of the attention and of each expert has a trained pair; the rest has no gradient."""
    layouts, turn = ADAPTED[world_size], 2 - world_size if everyday else None
    if everyday:
        layouts = {name: sizes for name, sizes in layouts.items() if name in ("one", "tp2sp ep2")}
    check(expected(model, lora=True), run_ranks(on_ranks, world_size, model, layouts, turn, False, True))


def without_the_key(path: str) -> tuple[torch.Tensor, ...]:
    """Norms of samples with routes, the key off and on; log-probs of the policy and of a KL penalty's reference."""
    samples, active = with_routes(make_samples(), path), torch.ones(PROMPTS, dtype=torch.bool)
    norms, step = [], whole_step(Batch([], samples, scored()))
    with layout() as parallel:
        for replay in (False, True):
            config = config_of(path, MODES["two_pass"], folds=4, replay=replay)
            policy = policy_of(path, parallel, config)
            gradients = StepGradient(policy, config)
            norms.append(gradients.norms(step, active))
        batches = one_per_microbatch(samples, range(len(samples)))
        table = Reference(policy).logprobs(samples, batches, temperature=0.8)
        return *norms, gradients.old_logprobs(step, active), table


def test_only_the_key_and_only_the_policy_replays(model: str) -> None:
    """Without the key the routers choose. So they do for the reference of a KL penalty. Old log-probs are replayed."""
    ((off, on, old, reference),) = run_ranks(without_the_key, 1, model)
    own, replayed = make_samples(), with_routes(make_samples(), model)
    weights = {name: tensor.double() for name, tensor in load_file(Path(model) / "model.safetensors").items()}
    config = AutoConfig.from_pretrained(model)
    for n, (plain, routed) in enumerate(zip(own, replayed, strict=True)):
        torch.testing.assert_close(reference[n, : plain.length], oracle_logprobs(weights, config, plain, 0.8))
        torch.testing.assert_close(old[n, : plain.length], oracle_logprobs(weights, config, routed, 0.8))
    active = expected(model)["norms"] > 0
    torch.testing.assert_close(off[active], expected(model)["norms"][active], rtol=RTOL, atol=0)
    torch.testing.assert_close(on[active], expected(model, replay=True)["norms"][active], rtol=RTOL, atol=0)
    changed = (on / off - 1).abs()[active & (torch.arange(len(off)) != 1)]  # sample 1 has no routes
    assert changed.median() > 0.1


SHARES = ([True, True, False, True], [False, True, False, False])


def of_some_prompts(path: str, ep: int = 2, lora: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Norms of the prompts in each share, by replicas that all hold a part of every expert."""
    with layout(ep=ep) as parallel:
        config = config_of(path, MODES["two_pass"], folds=2, lora=lora)
        gradients = StepGradient(policy_of(path, parallel, config), config)
        step = whole_step(Batch([], make_samples(), scored()))
        return [gradients.norms(step, torch.tensor(share)) for share in SHARES]


def test_norms_of_some_prompts_where_replicas_share_experts(model: str) -> None:
    """`gradnorm.sample_fraction`: a replica may have fewer of the measured prompts than another, or none."""
    whole = expected(model)["norms"].view(PROMPTS, GROUP)
    active = whole.any(-1)  # the oracle leaves a group of equal rewards out
    for found in run_ranks(of_some_prompts, 2, model):
        norms_of = [norms.view(PROMPTS, GROUP) for norms in found]
        for norms, share in zip(norms_of, torch.tensor(SHARES), strict=True):
            assert not norms[~share].any() and norms[share].any()
            torch.testing.assert_close(norms[share & active], whole[share & active], rtol=RTOL, atol=0)


def test_norms_of_adapters_of_attention_where_replicas_share_experts(model: str) -> None:
    """The experts are frozen, but replicas still go through them together. The norms are those of one rank."""
    lora = LORA | {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    (whole,) = run_ranks(of_some_prompts, 1, model, 1, lora)
    for found in run_ranks(of_some_prompts, 2, model, 2, lora):
        for norms, expected_norms in zip(found, whole, strict=True):
            assert norms.any()
            torch.testing.assert_close(norms, expected_norms, rtol=RTOL, atol=0)
