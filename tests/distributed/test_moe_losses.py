"""The losses of a mixture's routers: their gradient joins the policy gradient and changes no norm, in every layout.

fp64, relative 1e-10, against the oracle with the losses written out over its routers' logits. With one sample a
microbatch the auxiliary loss is the same in every layout; with several it runs over all of them, in rows or packed.

The same with routes that a rollout gave (`model.moe_routing_replay`): logits, losses and norms are those of the routes.
On one and two ranks they take a part of the cases; four ranks, without them, are nightly, like the other cases.

Not covered: Transformer Engine; the effect of the losses on training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.model.policy import build_policy
from oblr_megatron.norms import oracle as reference
from oblr_megatron.norms.oracle import oracle_logprobs, oracle_sq_norms
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import Wave, whole_step
from oblr_megatron.types import Prompt, RouterMetrics, Sample, Scored
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import Outcome, assert_outcomes, whole_gradients, with_routes
from tests.tiny import VOCAB, make_moe_hf_dir

NUM_PROMPTS, GROUP, FOLDS = 4, 2, 4
TEMPERATURE, AUX, Z = 0.7, 0.3, 0.05
ALONE = {"micro_batch_tokens": 1}  # a longer sample goes alone
EXPERTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
Case = tuple[str, dict[str, Any], dict[str, Any], int]  # name, layout, options of parallel, folds
CASES: dict[int, list[Case]] = {
    1: [
        ("one", {}, ALONE, FOLDS),
        ("one fold", {}, ALONE, 1),
        ("full", {}, ALONE | {"recompute_granularity": "full"}, FOLDS),
        ("together in rows", {}, {"micro_batch_tokens": 999}, 1),
        ("together packed", {}, {"micro_batch_tokens": 999, "packing": "packed"}, 1),
    ],
    2: [
        ("ep2", {"ep": 2}, ALONE, FOLDS),
        ("tp2sp ep2", {"tp": 2, "sp": True, "ep": 2, "etp": 1}, ALONE, FOLDS),
        ("cp2 ep2", {"cp": 2, "ep": 2}, ALONE, FOLDS),
        ("pp2 packed", {"pp": 2}, ALONE | {"packing": "packed"}, FOLDS),
        ("cp2 together packed", {"cp": 2}, {"micro_batch_tokens": 999, "packing": "packed"}, 1),
    ],
    4: [
        ("tp2sp pp2 experts again", {"tp": 2, "sp": True, "pp": 2}, ALONE | EXPERTS_AGAIN, FOLDS),
        ("pp2vp2 ep2 full", {"pp": 2, "vp": 2, "ep": 2}, ALONE | {"recompute_granularity": "full"}, FOLDS),
    ],
}


REPLAYED = ("one", "full", "together packed", "tp2sp ep2", "pp2 packed", "cp2 together packed")


def make_samples() -> list[Sample]:
    """Responses of several lengths, one of them empty; the log-probs are not used."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for n in range(NUM_PROMPTS * GROUP):
        prompt, response = 3 + n % 4, (5 * n) % 9
        ids = torch.randint(2, VOCAB, (prompt + response,), generator=generator).tolist()
        samples.append(
            Sample(n // GROUP, tuple(ids[:prompt]), tuple(ids[prompt:]), (-1.0,) * response, "", "length", 0)
        )
    return samples


def coefficients() -> torch.Tensor:
    """The samples of one prompt have 0: the pass leaves them out, but they stay in their fold."""
    values = torch.linspace(-1, 2, NUM_PROMPTS * GROUP, dtype=torch.float64)
    values[GROUP : 2 * GROUP] = 0
    return values


def config_of(path: str, options: dict[str, Any], folds: int, replay: bool, *, norms: bool = True) -> Config:
    model = {"path": path, "dtype": "float64", "moe_z_loss_coeff": Z, "moe_routing_replay": replay}
    return parse_config(
        {
            "run_dir": "unused",
            "num_prompts": NUM_PROMPTS,
            "group_size": GROUP,
            "model": model | {"moe_aux_loss_coeff": AUX},
            "data": {"train": "unused"},
            "algo": {"baseline": "none", "token_scale": 1, "snr": {"num_folds": folds}},
            "rollout": {"importance_sampling": "none", "temperature": TEMPERATURE},
            "gradnorm": {"mode": "two_pass", "always": norms},
            "parallel": options,
        }
    )


def layers_of(sizes: dict[str, Any]) -> int:
    """Two for each of two stages."""
    return 4 if "pp" in sizes else 2


def samples_of(path: str, replay: bool) -> list[Sample]:
    return with_routes(make_samples(), path) if replay else make_samples()


def step_of(samples: list[Sample], values: Tensor) -> Wave:
    """A step that has the given coefficients under the baseline `none`: c = r / (Q G)."""
    rewards = len(samples) * values.view(-1, GROUP)
    lengths = torch.tensor([sample.length for sample in samples]).view_as(rewards)
    prompts = [Prompt(n, str(n), "", (3,), "", "tests") for n in range(len(rewards))]
    return whole_step(Batch(prompts, samples, Scored(rewards, lengths, 0)))


def said_of(metrics: RouterMetrics) -> dict[str, float]:
    return {name: value for name, value in asdict(metrics).items() if value is not None}


def on_ranks(
    paths: dict[int, str], cases: Sequence[Case], replay: bool
) -> dict[str, tuple[Outcome, Tensor, dict[str, float]]]:
    """For each case: this rank's gradient, the norms of all samples, the routers' metrics."""
    found = {}
    for name, sizes, options, folds in cases:
        path = paths[layers_of(sizes)]
        samples = samples_of(path, replay)
        config = config_of(path, options, folds, replay)
        with layout(**sizes) as parallel:
            policy = build_policy(AutoConfig.from_pretrained(path), config.model, parallel, config.parallel)
            load_hf_weights(policy, Path(path))
            gradient, step = StepGradient(policy, config).begin(1), step_of(samples, coefficients())
            norms = gradient.norms(step, torch.ones(NUM_PROMPTS, dtype=torch.bool))
            gradient.add(step, AdvantageRule(step.scored, config))
            (stats,) = gradient.updates()
            assert stats.routers is not None, name
            found[name] = (whole_gradients(policy), stats.sq_norm), norms, said_of(stats.routers)
    return found


@contextmanager
def router_logits() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The router logits [T, E] of every layer in the oracle's passes inside, and the experts taken [T, k]."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = reference._mixture

    def mixture(hidden: Tensor, layer: Any, config: Any, routes: Tensor | None) -> Tensor:
        logits = hidden @ layer["mlp.gate.weight"].T
        own = logits.topk(config.num_experts_per_tok).indices
        seen.append((logits, own if routes is None else torch.where(routes < 0, own, routes)))
        return original(hidden, layer, config, routes)

    reference._mixture = mixture
    try:
        yield seen
    finally:
        reference._mixture = original


@lru_cache
def expected(path: str, together: bool, replay: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of the policy loss and the routers' losses, and the metrics; one microbatch, or one a sample."""
    config, weights = AutoConfig.from_pretrained(path), load_file(Path(path) / "model.safetensors")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    pairs = list(zip(samples_of(path, replay), coefficients().tolist(), strict=True))
    used = [(sample, value) for sample, value in pairs if value and sample.response_ids]
    loss, seen_by = torch.zeros((), dtype=torch.float64), []  # [sample][layer]: ([response tokens, E], [.., k])
    differing = replayed = 0
    for sample, value in used:
        with router_logits() as seen:
            loss = loss - value * oracle_logprobs(leaves, config, sample, TEMPERATURE).sum()
        answers = slice(len(sample.prompt_ids) - 1, -1)
        seen_by.append([(logits[answers], taken[answers]) for logits, taken in seen])
        if sample.routes is not None:
            known = torch.from_numpy(sample.routes[answers] >= 0)[..., 0]  # [response tokens, layers]
            replayed += int(known.sum()) * config.num_experts_per_tok
            differing += sum(differences(*pair, known[:, layer]) for layer, pair in enumerate(seen_by[-1]))
    layers = [[sample[layer] for sample in seen_by] for layer in range(config.num_hidden_layers)]
    if together:
        layers = [[tuple(torch.cat(parts) for parts in zip(*batches, strict=True))] for batches in layers]
    tokens, top, experts = sum(len(one) for one, _ in layers[0]), config.num_experts_per_tok, config.num_experts
    aux, z, load = torch.zeros(()).double(), torch.zeros(()).double(), 0.0
    for batches in layers:
        counts = [taken.flatten().bincount(minlength=experts) for _, taken in batches]
        for (scores, _), count in zip(batches, counts, strict=True):
            share, mean = count.double() / (len(scores) * top), scores.softmax(-1).mean(0)
            aux = aux + len(scores) / tokens * experts * (share * mean).sum()
            z = z + scores.logsumexp(-1).square().sum() / tokens
        load = max(load, float(sum(counts).max()) * experts / (tokens * top))
    (loss + AUX * aux + Z * z).backward()
    metrics = {"aux_loss": aux.item() / len(layers), "z_loss": z.item() / len(layers), "max_load": load}
    if replay:
        metrics["route_mismatch_fraction"] = differing / replayed
    return {name: leaf.grad for name, leaf in leaves.items()}, metrics


def differences(logits: Tensor, taken: Tensor, known: Tensor) -> int:
    """The own choices of tokens with a route that were not taken."""
    own, top = logits.argsort(descending=True), taken.shape[1]
    pairs = zip(own[known, :top].tolist(), taken[known].tolist(), strict=True)
    return sum(len(set(first) - set(second)) for first, second in pairs)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Models by their number of layers."""
    root = tmp_path_factory.mktemp("moe")
    options: dict[str, Any] = {"seed": 7, "dtype": torch.float64}
    return {layers: str(make_moe_hf_dir(root / f"{layers}", num_hidden_layers=layers, **options)) for layers in (2, 4)}


@lru_cache
def norms_of(path: str, replay: bool) -> Tensor:
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    return oracle_sq_norms(weights, AutoConfig.from_pretrained(path), samples_of(path, replay), TEMPERATURE)


def assert_reference(paths: dict[int, str], cases: Sequence[Case], world_size: int, replay: bool) -> None:
    """Gradient, norms and metrics of all cases on every rank."""
    ranks = run_ranks(on_ranks, world_size, paths, cases, replay)
    for name, sizes, *_ in cases:
        path = paths[layers_of(sizes)]
        norms = norms_of(path, replay)
        gradient, metrics = expected(path, "together" in name, replay)
        assert_outcomes([rank[name][0] for rank in ranks], gradient, name)
        for _, found, said in (rank[name] for rank in ranks):
            torch.testing.assert_close(found, norms, rtol=1e-10, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert said == pytest.approx(metrics, rel=1e-10), name


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_router_losses_are_added_to_the_gradient_and_to_no_norm(paths: dict[int, str], world_size: int) -> None:
    assert_reference(paths, CASES[world_size], world_size, replay=False)


@pytest.mark.parametrize(
    ("world_size", "nightly"),
    [*((size, False) for size in CASES), *(pytest.param(size, True, marks=pytest.mark.nightly) for size in (1, 2))],
)
def test_replayed_routes_are_those_of_the_losses_the_gradient_and_the_norms(
    paths: dict[int, str], world_size: int, nightly: bool
) -> None:
    cases = [case for case in CASES[world_size] if nightly or world_size == 4 or case[0] in REPLAYED]
    assert_reference(paths, cases, world_size, replay=True)
    _, metrics = expected(paths[4], together=False, replay=True)
    assert metrics["route_mismatch_fraction"] > 0.3  # 2 of 4 experts at random


def with_a_broken_sample(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of a step in which one sample's loss is NaN, and that of a step without this sample."""
    samples, values, last = make_samples(), coefficients(), NUM_PROMPTS * GROUP - 1
    broken = [*samples[:last], replace(samples[last], logprobs=(math.nan,) * samples[last].length)]
    without = values.clone()
    without[last] = 0
    config = config_of(path, ALONE, 1, replay=False, norms=False)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"importance_sampling": "token"})})
    plain = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
    unrouted = config.model_copy(update={"model": config.model.model_copy(update=plain)})
    with layout() as parallel:
        policy = build_policy(AutoConfig.from_pretrained(path), config.model, parallel, config.parallel)
        load_hf_weights(policy, Path(path))

        def of(config: Config, samples: list[Sample], values: Tensor) -> dict[str, Tensor]:
            step = step_of(samples, values)
            gradient = StepGradient(policy, config).begin(1)
            gradient.add(step, AdvantageRule(step.scored, config))
            assert len(list(gradient.updates())) == 1
            assert gradient.num_broken == (samples is broken)
            return whole_gradients(policy)

        found, alone, policy_alone = (
            of(config, broken, values),
            of(config, samples, without),
            of(unrouted, samples, without),
        )
    trained = [sample.length for sample, value in zip(samples, values, strict=True) if value]
    kept = 1 - samples[last].length / sum(trained)  # the divisor of router losses counts the broken sample
    return found, {name: part + kept * (alone[name] - part) for name, part in policy_alone.items()}


def test_a_broken_sample_takes_no_router_losses_of_others_with_it(paths: dict[int, str]) -> None:
    [(found, wanted)] = run_ranks(with_a_broken_sample, 1, paths[2])
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


def in_two_updates(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float], dict[str, float]]:
    """The gradient of half of the prompts: alone, and after the other half. Metrics: of both halves, of one pass."""
    config = config_of(path, ALONE, 1, replay=False, norms=False)
    samples, values, half = make_samples(), coefficients(), NUM_PROMPTS // 2 * GROUP
    with layout() as parallel:
        policy = build_policy(AutoConfig.from_pretrained(path), config.model, parallel, config.parallel)
        load_hf_weights(policy, Path(path))

        def last_update(config: Config, step: Wave) -> tuple[dict[str, Tensor], dict[str, float]]:
            gradient = StepGradient(policy, config).begin(1)
            gradient.add(step, AdvantageRule(step.scored, config))
            *_, stats = gradient.updates()
            assert stats.routers is not None
            return whole_gradients(policy), said_of(stats.routers)

        of_half = config.model_copy(update={"num_prompts": NUM_PROMPTS // 2})
        in_two = config.model_copy(update={"algo": config.algo.model_copy(update={"updates_per_batch": 2})})
        _, wanted = last_update(config, step_of(samples, values))
        alone, _ = last_update(of_half, step_of(samples[half:], values[half:]))
        later, found = last_update(in_two, step_of(samples, values / 2))
        return alone, later, found, wanted


def test_metrics_cover_all_updates_of_a_step_and_gradients_their_own(paths: dict[int, str]) -> None:
    """algo.updates_per_batch; here without a change of the weights, so that one pass has the same metrics."""
    [(alone, later, found, wanted)] = run_ranks(in_two_updates, 1, paths[2])
    assert found == pytest.approx(wanted, rel=1e-10)
    for name, gradient in alone.items():
        torch.testing.assert_close(later[name], gradient, rtol=1e-10, atol=1e-14)
