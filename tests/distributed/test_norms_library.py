"""The norms' library on models that a user builds equals autograd, sample by sample: fp64, relative 1e-10.

Each case compares, in every mode: the norms, a weighted sum, a sum of clipped gradients, and a sum with weights that
are asked for group by group. On two ranks a case has one of the three sums in each mode, in turn; the nightly test has
all. With megatron-core's data-parallel wrapper the sums are those after
`finalize_model_grads`; without it those in `.grad`.

Not covered: Transformer Engine's layers, CUDA.
"""

from __future__ import annotations

import math
import re
import zlib
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from oblr_megatron.errors import UserError
from oblr_megatron.model.moe import experts_of, mark_experts
from oblr_megatron.norms import clipped_grad_sum, per_sample_sq_grad_norms, tapped, weighted_grad_sum
from tests.distributed.launch import run_ranks
from tests.distributed.user_models import (
    LENGTHS,
    LOSSES,
    Batch,
    build,
    groups,
    named,
    oracle,
    packed,
    rows,
    samples,
    shard_of,
)

RTOL = 1e-10
ROUTER_RTOL = 1e-6
"""megatron-core's router has a softmax in fp32: its backward of c times a loss is not c times that of the loss."""
ROUTED = ("two_pass: clipped", "two_pass: by groups", "no handle")
MODES = ("two_pass", "bookkeep", "stash", "inline")
SUMS = ("weighted", "clipped", "by groups")
FACTORS = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
Case = tuple[str, str, str, dict[str, Any]]
CASES: dict[int, dict[str, Case]] = {  # family, loss, layout of the samples, sizes and options
    1: {
        "gpt": ("gpt", "margin", "rows", {}),
        "qwen2 rows": ("qwen2", "cross_entropy", "rows", {}),
        "qwen2 packed": ("qwen2", "margin", "packed", {"sdpa": True}),
        "moe": ("moe", "cross_entropy", "rows", {}),
    },
    2: {
        "gpt tp2 recompute": ("gpt", "cross_entropy", "single", {"tp": 2, "recompute": True}),
        "gpt pp2": ("gpt", "margin", "rows", {"pp": 2}),
        "gpt pp2 frozen stage": ("gpt", "margin", "rows", {"pp": 2, "frozen": "embedding|layer [12]:"}),
        # only the second stage has layers without a tap, for which microbatches are split
        "gpt pp2 frozen norms": ("gpt", "margin", "rows", {"pp": 2, "frozen": "layer [12]: .*(bias|norm)"}),
        "qwen2 tp2 recompute": ("qwen2", "margin", "rows", {"tp": 2, "recompute": True}),
        "qwen2 tp2 bare": ("qwen2", "cross_entropy", "rows", {"tp": 2, "bare": True}),
        "qwen2 tp2 sp": ("qwen2", "cross_entropy", "rows", {"tp": 2, "sp": True}),
        "qwen2 tp2 sp packed bare": ("qwen2", "margin", "packed", {"tp": 2, "sp": True, "sdpa": True, "bare": True}),
        "qwen2 pp2": ("qwen2", "cross_entropy", "single", {"pp": 2}),
        "qwen2 pp2 vp2 bare": ("qwen2", "margin", "single", {"pp": 2, "vp": 2, "bare": True}),
        "qwen2 cp2": ("qwen2", "margin", "rows", {"cp": 2, "sdpa": True}),
        "qwen2 cp2 packed bare": ("qwen2", "cross_entropy", "packed", {"cp": 2, "sdpa": True, "bare": True}),
        "gpt cp2": ("gpt", "cross_entropy", "rows", {"cp": 2, "sdpa": True}),
        "qwen2 dp2": ("qwen2", "cross_entropy", "rows", {}),
        "moe ep2": ("moe", "cross_entropy", "single", {"ep": 2}),
        "moe tp2 sp ep2": ("moe", "cross_entropy", "rows", {"tp": 2, "sp": True, "ep": 2, "etp": 1}),
        "moe tp2 sp": ("moe", "cross_entropy", "single", {"tp": 2, "sp": True}),
    },
}


def wrapped(model: Any, bare: bool) -> Any:
    if bare:
        return model
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def layout_of(mine: list[int], how: str) -> list[Batch]:
    parts = [samples()[index] for index in mine]
    if how == "single":
        return parts
    join = rows if how == "rows" else packed
    return [join(parts[:3]), *(join([part]) for part in parts[3:])]


def trained(chunk: Any, bare: bool) -> list[tuple[str, Any]]:
    return [(name, param) for name, param in named(chunk if bare else chunk.module) if param.requires_grad]


def gradients(chunks: list[Any], bare: bool) -> dict[str, Tensor]:
    found = {}
    for chunk in chunks:
        for name, param in trained(chunk, bare):
            grad = param.grad if bare else param.main_grad
            assert grad is not None, name
            found[name] = grad.clone()
            assert not (bare and hasattr(param, "main_grad")), name
    return found


def error_of(found: dict[str, Tensor], chunks: list[Any], bare: bool, wanted: dict[str, Tensor]) -> float:
    """The largest difference of any parameter, relative to its largest element in the whole model."""
    errors = [0.0]  # a stage may be frozen
    for chunk in chunks:
        for name, param in trained(chunk, bare):
            difference = (found[name] - shard_of(name, param, wanted[name])).abs().max()
            errors.append(float(difference / wanted[name].abs().max().clamp(min=1e-300)))
    return max(errors)


def layers_of(sizes: dict[str, Any]) -> int:
    """Two for each of two stages."""
    return 4 if "pp" in sizes else 2


def case_of(
    family: str, loss: str, how: str, sizes: dict[str, Any], wanted: list[dict[str, Tensor]], turn: int, every: bool
) -> dict[str, float]:
    """Relative errors of a case, on this rank: of one sum, in turn, or `every` one of each mode.

    One mode, in turn, also gives the norms alone.
    """
    sizes = dict(sizes)
    options = {name: sizes.pop(name) for name in ("sp", "sdpa", "recompute") if name in sizes}
    layers = layers_of(sizes)
    bare, frozen = sizes.pop("bare", False), sizes.pop("frozen", "$^")
    wanted = [{name: grad for name, grad in grads.items() if not re.match(frozen, name)} for grads in wanted]
    norms = torch.stack([sum(g.square().sum() for g in grads.values()) for grads in wanted])
    limit = float(norms.sqrt().median())
    clips = (limit / norms.sqrt()).clamp(max=1)
    errors: dict[str, float] = {}
    with groups(**sizes):
        models = build(family, layers=layers, vp=sizes.get("vp"), **options)
        for name, param in (pair for model in models for pair in named(model)):
            param.requires_grad_(not re.match(frozen, name))
        chunks = [wrapped(model, bare) for model in models]
        dp, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = list(range(dp, len(LENGTHS), replicas))
        batches, given = layout_of(mine, how), chunks if len(chunks) > 1 else chunks[0]

        def summed(name: str, factors: Tensor, call: Any, expected: Tensor = norms) -> None:
            for chunk in chunks:
                chunk.zero_grad(set_to_none=True) if bare else chunk.zero_grad_buffer()
            found, expected = call(), expected[mine]
            assert torch.equal(found.isfinite(), expected.isfinite()), name
            errors[f"{name}: norms"] = float((found / expected - 1).abs()[expected.isfinite()].max())
            if not bare:
                finalize_model_grads(chunks)
            total = {k: sum(c * grads[k] for c, grads in zip(factors, wanted, strict=True)) for k in wanted[0]}
            errors[name] = error_of(gradients(chunks, bare), chunks, bare, total)

        per_sample = LOSSES[loss]
        left_out = FACTORS.tolist().index(0)
        lost = norms.clone()
        lost[left_out] = math.nan

        def broken(logits: Tensor, batch: Batch) -> Tensor:
            """NaN for a sample with factor 0."""
            assert batch.lengths is not None
            own = batch.lengths == samples()[left_out].lengths
            return per_sample(logits, batch) * torch.where(own, math.nan, 1.0)

        with tapped(given) as handle:
            shared = sizes.get("ep", 1) > sizes.get("tp", 1)
            for place, mode in enumerate(MODES[:1] if shared else MODES):
                if shared or turn % len(MODES) == place:
                    found = per_sample_sq_grad_norms(handle, batches, per_sample, mode=mode)
                    errors[f"{mode}: norms alone"] = float((found / norms[mine] - 1).abs().max())
                sums = SUMS if every or shared else SUMS[(turn + place) % len(SUMS) :][:1]
                if "weighted" in sums or mode == "inline":
                    call = partial(weighted_grad_sum, handle, batches, per_sample, FACTORS[mine], mode=mode)
                    summed(f"{mode}: weighted", FACTORS, call)
                if mode == "two_pass" and (every or turn % 2):
                    call = partial(weighted_grad_sum, handle, batches, broken, FACTORS[mine], mode=mode)
                    summed("two_pass: not finite", FACTORS, call, lost)
                if "clipped" in sums and mode != "inline":
                    call = partial(clipped_grad_sum, handle, batches, per_sample, limit, mode=mode)
                    summed(f"{mode}: clipped", clips, call)
                if "by groups" in sums and mode != "inline":
                    seen: list[int] = []
                    call = partial(by_groups, handle, batches, per_sample, limit, mode, seen)
                    summed(f"{mode}: by groups", clips * torch.tensor(NUMBERS[replicas]), call)
                    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
                    errors[f"{mode}: records of {seen}"] = float(sorted(seen) != list(range(len(mine))) * last)
        summed("no handle", clips, partial(clipped_grad_sum, given, batches, per_sample, limit))
        plain(chunks, bare, errors)
    return errors


NUMBERS = {1: [1, 1, 2, 2], 2: [1, 1, 1, 1]}
"""1 + the number of each sample's group on its replica, by the number of replicas."""


def by_groups(handle: Any, batches: list[Batch], loss: Any, limit: float, mode: Any, seen: list[int]) -> Tensor:
    """Groups of two samples, a window for each; `seen` gets the samples of the loss's records."""

    def recorded(logits: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.sample_index is not None
        return loss(logits, batch), {"samples": batch.sample_index}

    def rule(groups: Any, norms: Tensor) -> Tensor:
        assert norms.shape == (len(groups), 2)
        return (limit / norms.sqrt()).clamp(max=1) * (1 + torch.tensor(list(groups))[:, None])

    norms, records = weighted_grad_sum(
        handle, batches, recorded, rule, mode=mode, groups=2, window_tokens=1, records=True
    )
    seen += [n for record in records for n in record["samples"].tolist()]
    return norms


def plain(chunks: list[Any], bare: bool, errors: dict[str, float]) -> None:
    """After the taps are gone, nothing of them is left in the modules."""
    for chunk in chunks:
        for module in chunk.modules():
            left = {"forward", "_forward_impl"} & vars(module).keys()
            errors[f"left in {type(module).__name__}: {sorted(left)}"] = float(bool(left))


def on_ranks(cases: dict[str, Case], oracles: Path, every: bool) -> dict[tuple[str, str], float]:
    wanted, found = torch.load(oracles), {}
    for turn, (name, case) in enumerate(cases.items()):
        oracles_of_case = wanted[*case[:2], layers_of(case[3])]
        found |= {(name, what): error for what, error in case_of(*case, oracles_of_case, turn, every).items()}
    return found


def save_oracles(path: Path) -> None:
    kinds = {(family, loss, layers_of(sizes)) for table in CASES.values() for family, loss, _, sizes in table.values()}
    torch.save({kind: oracle(*kind) for kind in sorted(kinds)}, path)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracles") / "gradients.pt"
    run_ranks(save_oracles, 1, path)
    return path


def tolerance(name: str, what: str) -> float:
    return ROUTER_RTOL if name.startswith("moe") and what in ROUTED else RTOL


@pytest.mark.parametrize(
    ("world_size", "every"), [(1, True), (2, False), pytest.param(2, True, marks=pytest.mark.nightly)]
)
def test_every_mode_equals_autograd(world_size: int, every: bool, oracles: Path) -> None:
    cases = CASES[world_size]
    for rank in run_ranks(on_ranks, world_size, cases, oracles, every, deadline_s=400.0):
        wrong = {case: error for case, error in rank.items() if not error <= tolerance(*case)}
        assert not wrong, wrong
        assert {name for name, _ in rank} == cases.keys() and len(rank) > 10 * len(cases)


def noise_of_docs(recipe: str, family: str, sizes: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """(name, weight, noise) of each parameter on this rank; a tied embedding is left to the user."""
    with groups(**{name: size for name, size in sizes.items() if name != "sp"}):
        models = build(family, vp=sizes.get("vp"), sp=sizes.get("sp", False))
        for model in models:
            mark_experts(model)
        chunks = [wrapped(model, False) for model in models]
        names = {"chunks": chunks, "parallel_state": parallel_state, "torch": torch, "zlib": zlib}
        exec(recipe, names | {"run_seed": 1, "step": 2, "sigma": 1.0, "max_norm": 1.0})
        return [
            (name, param.detach(), param.main_grad.clone())
            for chunk in chunks
            for name, param in chunk.named_parameters()
            if "word_embeddings" not in name and "output_layer" not in name
        ]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("moe", {"ep": 2}),
        ("moe", {"tp": 2, "etp": 1, "sp": True}),
        ("qwen2", {"tp": 2}),
        ("qwen2", {"pp": 2, "vp": 2}),
    ],
)
def test_copies_have_one_noise_and_shards_their_own(family: str, sizes: dict[str, Any]) -> None:
    """The recipe of docs/norms_library.md: the noise of two parameters is equal exactly where the weights are."""
    page = (Path(__file__).parents[2] / "docs/norms_library.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(for number, chunk .*?)```", page, re.DOTALL)
    found = [each for rank in run_ranks(noise_of_docs, 2, recipe, family, sizes) for each in rank]
    same = 0
    for (name, weight, noise), (other, other_weight, other_noise) in combinations(found, 2):
        if weight.shape == other_weight.shape:
            equal = torch.equal(weight, other_weight)
            assert torch.equal(noise, other_noise) == equal, (name, other)
            same += equal
    assert len(found) > 20 and bool(same) != ("pp" in sizes)


def averaged(sizes: dict[str, int], built: bool, later: bool, wanted: Tensor) -> tuple[str, float]:
    """The refusal of a sum, and the relative error of the norms, of a wrapper built with this calculate_per_token_loss.

    The flag has another value later.
    """
    with groups(**sizes):
        (model,) = build("qwen2", layers=2, sdpa=True)
        model.config.calculate_per_token_loss = built
        chunk = wrapped(model, False)
        model.config.calculate_per_token_loss = later
        norms = per_sample_sq_grad_norms(chunk, samples(), LOSSES["margin"])
        try:
            clipped_grad_sum(chunk, samples(), LOSSES["margin"], 1.0)
        except UserError as error:
            return error.fix, float((norms / wanted - 1).abs().max())
        return "", float((norms / wanted - 1).abs().max())


@pytest.mark.parametrize(
    ("sizes", "flags", "accepted"),
    [
        ({"cp": 2}, (False, False), False),
        ({"cp": 2}, (True, True), True),
        ({}, (False, True), False),
        ({}, (False, False), True),  # a mean over replicas, as the page says
    ],
)
def test_wrappers_that_divide_sums_are_refused(
    sizes: dict[str, int], flags: tuple[bool, bool], accepted: bool, oracles: Path
) -> None:
    """By CP, or although the configuration says that they do not. Norms are right in any case."""
    gradients = torch.load(oracles)["qwen2", "margin", 2]
    wanted = torch.stack([sum(g.square().sum() for g in grads.values()) for grads in gradients])
    for fix, error in run_ranks(averaged, 2, sizes, *flags, wanted):
        assert error <= RTOL and ("before you wrap the model" in fix) != accepted


def refusal_of_unmarked_experts() -> str:
    """As megatron-core 0.16 builds them."""
    with groups(tp=2, etp=1):
        (model,) = build("moe", sp=True)
        for parameter in experts_of(model):
            parameter.allreduce = True  # type: ignore[attr-defined]
        with pytest.raises(UserError) as caught, tapped(wrapped(model, False)):
            pass
        return caught.value.fix


def test_copies_of_experts_without_a_mark_are_refused() -> None:
    assert all("mark_experts(model)" in fix for fix in run_ranks(refusal_of_unmarked_experts, 2))
