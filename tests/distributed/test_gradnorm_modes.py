"""Every mode gives the oracle's norms and the gradient sum_n A_n grad_n, in every layout: fp64, relative 1e-10.

The real advantage rule (leave-one-out `optimal`, truncated importance ratios) turns norms into the gradient. A whole
step is compared: norms w, loss, B = ||g||^2 and M of the folds with the oracle's, and every element of the gradient
with that of the layout's first mode (test_updates.py compares elements with an oracle). The same holds for a step with
prompts that come in waves (`rollout.overlap = "stream"`), out of order.

Twins are the same mode with other windows (`TWINS`). Each layout takes one of two twins, and lets half of its modes
stream; the other layouts take the others. Every mode meets every axis of a layout. Where axes meet each other (on four
ranks, packed, recomputed), a layout takes every second mode. The nightly tests run every mode, also streamed, in every
layout.

Not covered: fp8, CUDA; expert parallelism (test_gradnorm_experts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from oblr_megatron.algo.advantage import AdvantageRule
from oblr_megatron.algo.formulas import History
from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import Config, parse_config
from oblr_megatron.gradient.estimate import measured_prompts
from oblr_megatron.gradient.step_gradient import StepGradient
from oblr_megatron.memory.select_mode import with_mode
from oblr_megatron.model.parallel import Parallel
from oblr_megatron.model.policy import Policy, build_policy
from oblr_megatron.norms.oracle import oracle_gradient, oracle_logprobs
from oblr_megatron.rollout.dynamic_sampling import Batch
from oblr_megatron.rollout.waves import Wave, whole_step
from oblr_megatron.types import GradientStats, Sample, Scored
from tests.distributed.adapters import LORA, factors, fill, merged, of_factors
from tests.distributed.gradnorm_cases import drawn
from tests.distributed.launch import layout, run_ranks
from tests.distributed.passes import hf_config_of, with_routes
from tests.tiny import VOCAB, make_hf_dir

PROMPTS, GROUP = 4, 3
WAVES = [[1, 3], [2], [0]]  # positions of prompts in the order in which they are finished
RTOL = 1e-10
EARLIER = History(running_mean_norm=3.0)
MASKED_OUT = 10  # the sample with tokens, but none of the policy
MODES: dict[str, dict[str, Any]] = {
    "two_pass": {"mode": "two_pass"},
    "stash": {"mode": "stash"},
    "bookkeep": {"mode": "bookkeep"},
    "windows": {"mode": "bookkeep", "window_tokens": 30},
    "inline": {"mode": "inline"},
}
TWINS = ("bookkeep", "windows")
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"dp2": {}, "tp2sp": {"tp": 2, "sp": True}, "pp2": {"pp": 2}, "cp2": {"cp": 2}},
    4: {
        "dp4": {},
        "tp2dp2": {"tp": 2},
        "tp2sppp2": {"tp": 2, "sp": True, "pp": 2},
        "tp4": {"tp": 4},
        "cp2tp2sp": {"cp": 2, "tp": 2, "sp": True},
        "cp2pp2": {"cp": 2, "pp": 2},
        "cp2dp2": {"cp": 2},
    },
}
PACKED = {"packing": "packed"}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full"}
VARIANTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {  # with stages: of a model of four layers
    1: {"packed": ({}, PACKED), "selective": ({}, SELECTIVE), "full": ({}, FULL)},
    2: {
        "pp2vp2": ({"pp": 2, "vp": 2}, {}),
        "pp2vp2 packed full": ({"pp": 2, "vp": 2}, PACKED | FULL),
        "pp2 full": ({"pp": 2}, FULL),
        "tp2sp packed selective": ({"tp": 2, "sp": True}, PACKED | SELECTIVE),
        "cp2 packed": ({"cp": 2}, PACKED),
        "cp2 full": ({"cp": 2}, FULL),
    },
    4: {"tp2sp pp2vp2 packed full": ({"tp": 2, "sp": True, "pp": 2, "vp": 2}, PACKED | FULL)},
}


FAMILY_LAYOUTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {  # biases are cut by TP and summed by CP
    "qwen2": {"tp2sp packed": ({"tp": 2, "sp": True}, PACKED), "cp2": ({"cp": 2}, {})},
    "llama": {"cp2 packed": ({"cp": 2}, PACKED)},
}


ADAPTED: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    1: {"full": ({}, FULL), "one": ({}, {}), "packed": ({}, PACKED)},
    2: {
        "tp2sp packed": ({"tp": 2, "sp": True}, PACKED),
        "cp2 packed": ({"cp": 2}, PACKED),
        "tp2": ({"tp": 2}, {}),
        "tp2sp full": ({"tp": 2, "sp": True}, FULL),
        "pp2vp2": ({"pp": 2, "vp": 2}, {}),
        "dp2": ({}, {}),
    },
    4: {
        "cp2tp2sp packed": ({"cp": 2, "tp": 2, "sp": True}, PACKED),
        "tp2sppp2": ({"tp": 2, "sp": True, "pp": 2}, {}),
        "tp2sp pp2vp2 packed full": ({"tp": 2, "sp": True, "pp": 2, "vp": 2}, PACKED | FULL),
        "cp2tp2": ({"cp": 2, "tp": 2}, {}),
    },
}


@cache
def make_samples() -> list[Sample]:
    """Lengths differ, one response is empty, tokens repeat; the rewards of one group are equal, so it is left out.

    In every other response an environment wrote some tokens, at the beginning, inside or at the end; in one, all.
    """
    random = Random(4)
    samples = []
    for n in range(PROMPTS * GROUP):
        prompt, response = 2 + n // GROUP, (4 * n + 6) % 9
        ids = [random.randrange(2, VOCAB) for _ in range(prompt + response)]
        ids = [ids[0] if j % 3 == 0 else token for j, token in enumerate(ids)]
        drawn = torch.tensor([-math.log(VOCAB) + random.uniform(-0.5, 0.5) for _ in range(response)])
        logprobs = tuple(drawn.tolist())  # of fp32, as a microbatch holds them: the ratios are exact
        mask = tuple(place % 3 != (n // 2 + 1) % 3 for place in range(response)) if n % 2 else ()
        if n == MASKED_OUT:
            mask = (False,) * response
        logprobs = tuple(value if own else 0.0 for value, own in zip(logprobs, mask or logprobs, strict=True))
        sample = Sample(n // GROUP, tuple(ids[:prompt]), tuple(ids[prompt:]), logprobs, "", "stop", 0, mask)
        samples.append(sample)
    return samples


@cache
def scored() -> Scored:
    """Rewards of one group are equal."""
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 1], [1, 1, 1], [0.25, 0, 1]], dtype=torch.float64)
    lengths = torch.tensor([sample.length for sample in make_samples()]).view(PROMPTS, GROUP)
    return Scored(rewards, lengths, 0)


def samples_of(config: Config) -> list[Sample]:
    """The samples; with routing replay they have routes at random."""
    path = str(config.model.path)
    return with_routes(make_samples(), path) if config.model.moe_routing_replay else make_samples()


def config_of(
    path: str,
    gradnorm: dict[str, Any],
    folds: int,
    *,
    replay: bool = False,
    algo: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **parallel: Any,
) -> Config:
    """In any mode: these tests give `inline` its coefficients, so it works with a baseline that it is refused with."""
    model = {"path": path, "dtype": "float64", "make_vocab_size_divisible_by": 8, "moe_routing_replay": replay}
    model["lora"] = lora or {}
    config = parse_config(
        {
            "run_dir": "unused",
            "num_prompts": PROMPTS,
            "group_size": GROUP,
            "model": model,
            "data": {"train": "unused"},
            "algo": {"baseline": "optimal", "token_scale": 1, "snr": {"num_folds": folds}} | (algo or {}),
            "rollout": {"importance_sampling": "token", "importance_cap": 1.1, "temperature": 0.8},
            "parallel": {"micro_batch_tokens": 24} | parallel,
            "gradnorm": gradnorm | {"mode": "two_pass"},
        }
    )
    return with_mode(config, gradnorm["mode"])


def policy_of(path: str, parallel: Parallel, config: Config) -> Policy:
    policy = build_policy(hf_config_of(path), config.model, parallel, config.parallel)
    load_hf_weights(policy, Path(path))
    fill(policy)
    return policy


def step_of(
    path: str, parallel: Parallel, config: Config, *, again: bool = False, streamed: bool = False
) -> dict[str, Any]:
    """A step's metrics and the gradient it leaves on this rank; `again`: of a second step, in the buffers of the first.

    What a buffer keeps from one step to the next does not depend on the layout. `streamed` adds the same step in waves.
    """
    policy = policy_of(path, parallel, config)
    gradients = StepGradient(policy, config)
    for _ in range(1 + again):
        found = in_waves(gradients, path, config, [list(range(PROMPTS))])
    gradient = {name: parameter.main_grad.clone() for name, parameter in policy.trained_parameters()}
    metrics = found | {"gradient": gradient}
    if streamed:
        metrics["streamed"] = in_waves(gradients, path, config, WAVES)
        metrics["streamed"]["difference"] = max(
            relative_difference(parameter.main_grad, gradient[name]) for name, parameter in policy.trained_parameters()
        )
    return metrics


def in_waves(gradients: StepGradient, path: str, config: Config, waves: list[list[int]]) -> dict[str, Any]:
    """A step of prompts that come in waves; each wave has an advantage rule of its own prompts."""
    gradients.begin(1)
    known = None  # in mode inline coefficients do not depend on the pass: the norms are known before it
    if config.gradnorm.mode == "inline":
        wanted = expected(path, config.model.moe_routing_replay, lora=config.model.lora.rank > 0)
        known = wanted["norms"].view(PROMPTS, GROUP)
    samples = samples_of(config)
    for number, wave in enumerate(waves, 1):
        part = Scored(scored().rewards[wave], scored().lengths[wave], 0)
        rule = AdvantageRule(part, config, EARLIER) if known is None else KnownNorms(part, config, known[wave])
        own = [sample for position in wave for sample in samples[position * GROUP : (position + 1) * GROUP]]
        gradients.add(Wave(wave, Batch([], own, part), last=number == len(waves)), rule)
    (stats,) = gradients.updates()
    described = {"loss": stats.loss, "B": stats.sq_norm, "M": stats.fold_sq_norm_mean}
    return {"norms": gradients.norms_sq.flatten(), "stats": described, "tokens": stats.num_tokens}


class KnownNorms(AdvantageRule):
    """The rule of norms [k, G] that are known, whatever a pass measures."""

    def __init__(self, part: Scored, config: Config, norms: torch.Tensor) -> None:
        super().__init__(part, config, EARLIER)
        self._known = norms

    def __call__(self, prompts: Sequence[int], norms_sq: torch.Tensor) -> torch.Tensor:
        return super().__call__(prompts, self._known[list(prompts)])


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the largest element; 0 for a shard of padding alone."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=torch.finfo(torch.float64).tiny))


def modes_of(turn: int | None, few: bool) -> dict[str, dict[str, Any]]:
    """All but one of two twins; `few`: every second mode; None: all."""
    if turn is None:
        return MODES
    names = list(MODES)[turn % 2 :: 2] if few else [mode for mode in MODES if mode != TWINS[turn % 2]]
    return {mode: MODES[mode] for mode in names}


def on_ranks(
    path: str, layouts: dict[str, tuple[dict[str, Any], dict[str, Any]]], turn: int | None, few: bool = False
) -> dict[tuple[str, str], dict[str, Any]]:
    """Steps by name of the layout and mode; `turn` and `few` choose the modes and those that stream; None: all."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for place, (name, (sizes, options)) in enumerate(layouts.items()):
        now = None if turn is None else turn + place
        with layout(**sizes) as parallel:
            modes = modes_of(now, few)

            def config(gradnorm: dict[str, Any], options: dict[str, Any] = options) -> Config:
                return config_of(path, gradnorm, folds=4, **options)

            steps = steps_of(path, parallel, modes, config, None if now is None else now // 2, again=name == "one")
            results |= {(name, mode): step for mode, step in steps.items()}
    return results


def steps_of(
    path: str,
    parallel: Parallel,
    modes: dict[str, dict[str, Any]],
    config: Callable[[dict[str, Any]], Config],
    turn: int | None,
    *,
    again: bool,
) -> dict[str, dict[str, Any]]:
    """A step in every mode, also streamed in every second mode from `turn` on; None: in all."""
    found: dict[str, dict[str, Any]] = {}
    plain: dict[str, torch.Tensor] = {}
    for place, (mode, gradnorm) in enumerate(modes.items()):
        streamed = turn is None or (turn + place) % 2 == 0
        step = step_of(path, parallel, config(gradnorm), again=again, streamed=streamed)
        gradient = step.pop("gradient")
        plain = plain or gradient
        step["difference"] = max(relative_difference(gradient[key], plain[key]) for key in plain)
        if streamed:
            found[f"{mode} streamed"] = step.pop("streamed")
        found[mode] = step
    return found


@cache
def oracle_of(
    path: str, replay: bool, lora: bool = False
) -> tuple[list[dict[str, torch.Tensor]], list[float], torch.Tensor]:
    """The gradient of each sample, its sum of ratio times log-prob, and its squared norm [n], by autograd."""
    config = config_of(path, {"mode": "two_pass"}, folds=4, replay=replay)
    hf_config = AutoConfig.from_pretrained(path)
    weights = {name: tensor.double() for name, tensor in load_file(Path(path) / "model.safetensors").items()}
    gradients, scores, pairs = [], [], factors(weights) if lora else {}
    weights = merged(weights, pairs)
    for sample in samples_of(config):
        logprobs = oracle_logprobs(weights, hf_config, sample, 0.8)
        ratio = (logprobs - drawn(sample)).exp().clamp(max=1.1)
        gradient = oracle_gradient(weights, hf_config, sample, 0.8, ratio)
        gradients.append(of_factors(gradient, pairs) if lora else gradient)
        scores.append(float((ratio * logprobs).sum()))
    return gradients, scores, torch.stack([sum(g.square().sum() for g in grad.values()) for grad in gradients])


@cache
def expected(path: str, replay: bool = False, norm_power: float = 0.0, lora: bool = False) -> dict[str, Any]:
    """The step by the oracle: autograd sample by sample, sums written out."""
    config = config_of(path, {"mode": "two_pass"}, folds=4, replay=replay, algo={"norm_power": norm_power})
    gradients, scores, norms = oracle_of(path, replay, lora)
    used = norms.view(PROMPTS, GROUP).clone()
    used[2] = 0  # the group of equal rewards is left out
    coefficients = AdvantageRule(scored(), config, EARLIER)(range(PROMPTS), used).flatten()
    folds = [
        {k: -sum(coefficients[n] * gradients[n][k] for n in range(q * GROUP, (q + 1) * GROUP)) for k in gradients[0]}
        for q in range(PROMPTS)
    ]
    total = {k: sum(fold[k] for fold in folds) for k in gradients[0]}
    tokens = sum(s.length for n, s in enumerate(make_samples()) if n // GROUP != 2)
    return {
        "norms": used.flatten(),
        "stats": {
            "loss": -sum(float(c) * score for c, score in zip(coefficients, scores, strict=True)),
            "B": sum(float(g.square().sum()) for g in total.values()),
            "M": PROMPTS * sum(float(g.square().sum()) for fold in folds for g in fold.values()),
        },
        "tokens": tokens,
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    options = {"tied": {"tied": True, "seed": 5}, "untied": {"seed": 6}, "deep": {"tied": True, "num_hidden_layers": 4}}
    options |= {family: {"family": family, "seed": 7} for family in FAMILY_LAYOUTS}
    return {name: str(make_hf_dir(root / name, dtype=torch.float64, **o)) for name, o in options.items()}


NIGHTLY = pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])


@NIGHTLY
@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_mode_is_the_oracles_step(models: dict[str, str], world_size: int, model: str, nightly: bool) -> None:
    """The layouts have tied and untied embeddings in turn; the nightly test takes all layouts with both.

    Four replicas, which add nothing to two, are nightly.
    """
    first = model == "untied"
    names = list(LAYOUTS[world_size]) if nightly or world_size == 1 else list(LAYOUTS[world_size])[first::2]
    names = [name for name in names if nightly or name != "dp4"]
    layouts = {name: (LAYOUTS[world_size][name], {}) for name in names}
    turn = None if nightly else first + world_size // 2
    check(expected(models[model]), run_ranks(on_ranks, world_size, models[model], layouts, turn, world_size == 4))


@NIGHTLY
@pytest.mark.parametrize("family", FAMILY_LAYOUTS)
def test_every_mode_of_other_families(models: dict[str, str], family: str, nightly: bool) -> None:
    turn = None if nightly else len(family) % 2
    check(expected(models[family]), run_ranks(on_ranks, 2, models[family], FAMILY_LAYOUTS[family], turn))


@NIGHTLY
@pytest.mark.parametrize(("world_size", "model"), [(1, "tied"), (2, "tied"), (2, "deep"), (4, "deep")])
def test_packing_recomputation_and_interleaving(
    models: dict[str, str], world_size: int, model: str, nightly: bool
) -> None:
    layouts = {name: case for name, case in VARIANTS[world_size].items() if ("pp" in case[0]) == (model == "deep")}
    turn = None if nightly else world_size
    check(expected(models[model]), run_ranks(on_ranks, world_size, models[model], layouts, turn, world_size > 1))


@pytest.mark.parametrize(
    ("world_size", "everyday"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.nightly) for n in ADAPTED)]
)
def test_every_mode_of_adapters(models: dict[str, str], world_size: int, everyday: bool) -> None:
    """Every matrix has a trained pair A, B; the rest of the model has no gradient."""
    cases = dict(list(ADAPTED[world_size].items())[:1]) if everyday else ADAPTED[world_size]
    layouts = {name: (sizes, options | {"lora": LORA}) for name, (sizes, options) in cases.items()}
    model = models["tied" if everyday else "deep"]
    check(expected(model, lora=True), run_ranks(on_ranks, world_size, model, layouts, 0 if everyday else None))


def test_tempered_coefficients_in_every_mode(models: dict[str, str]) -> None:
    """Each response's norm enters its own coefficient, also in waves and where ranks have parts of a response."""
    tempered = {"algo": {"norm_power": 0.25}}
    layouts = {"dp2": ({}, tempered), "tp2sp packed": ({"tp": 2, "sp": True}, PACKED | tempered)}
    wanted = expected(models["tied"], norm_power=0.25)
    assert wanted["stats"]["B"] != pytest.approx(expected(models["tied"])["stats"]["B"], rel=0.1)
    check(wanted, run_ranks(on_ranks, 2, models["tied"], layouts, 0, True))


def thinned_steps(path: str, layouts: dict[str, dict[str, Any]]) -> dict[tuple[str, str], tuple[torch.Tensor, ...]]:
    """Weights, norms, coefficients [Q, G] and squared norm of the gradient, by layout and mode."""
    results = {}
    for name, sizes in layouts.items():
        with layout(**sizes) as parallel:
            for mode in ("two_pass", "inline"):
                gradnorm = MODES[mode] | {"always": True}
                config = config_of(path, gradnorm, folds=4, algo={"baseline": "rloo", "keep": 0.5})
                gradients = StepGradient(policy_of(path, parallel, config), config).begin(1)
                gradients.add(whole_step(Batch([], make_samples(), scored())), AdvantageRule(scored(), config))
                (stats,) = gradients.updates()
                measured = gradients.norms_sq, gradients.coefficients, torch.tensor(stats.sq_norm, dtype=torch.float64)
                results[name, mode] = (gradients.kept, *measured)
    return results


def test_a_thinned_gradient_has_the_responses_that_are_kept(models: dict[str, str]) -> None:
    """The same responses on every rank in every layout, each with the weight 1 / pi, and no others."""
    gradients, _, norms = oracle_of(models["tied"], False)
    results = [*run_ranks(thinned_steps, 1, models["tied"], {"one": {}})]
    results += run_ranks(thinned_steps, 2, models["tied"], {"dp2": {}, "tp2sp": {"tp": 2, "sp": True}})
    weights = results[0]["one", "inline"][0]
    assert not weights[2].any(), "equal rewards"
    assert GROUP <= int((weights > 0).sum()) <= 2 * GROUP + 2
    whole = config_of(models["tied"], MODES["two_pass"], folds=4, algo={"baseline": "rloo"})
    c = weights * AdvantageRule(scored(), whole)(range(PROMPTS), torch.zeros(PROMPTS, GROUP, dtype=torch.float64))
    total = [sum(c.flatten()[n] * g[name] for n, g in enumerate(gradients)) for name in gradients[0]]
    wanted = (weights, norms.view_as(c) * (weights > 0), c, sum(part.square().sum() for part in total))
    for number, found in enumerate(results):
        for case, values in found.items():
            for value, want in zip(values, wanted, strict=True):
                torch.testing.assert_close(
                    value, want, rtol=RTOL, atol=0, msg=lambda m, where=(number, case): f"{where}: {m}"
                )


def check(wanted: dict[str, Any], results: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    for rank, found in enumerate(results):
        for case, metrics in found.items():
            torch.testing.assert_close(
                metrics["norms"], wanted["norms"], rtol=RTOL, atol=0, msg=lambda m, c=(rank, case): f"{c}: {m}"
            )
            tokens = metrics.pop("tokens")  # two_pass also leaves out single samples with an advantage of 0
            assert tokens == wanted["tokens"] or (case[1].startswith("two_pass") and tokens < wanted["tokens"])
            assert metrics["stats"] == pytest.approx(wanted["stats"], rel=RTOL), (rank, case)
            assert metrics["difference"] <= RTOL, (rank, case, metrics["difference"])


class EveryGroup(AdvantageRule):
    """A rule that leaves out no group."""

    @property
    def active(self) -> torch.Tensor:
        return torch.ones(PROMPTS, dtype=torch.bool)


UNMEASURED: dict[str, dict[str, Any]] = {  # only losses tell that a sample is broken
    "length": {"source": "length", "always": True},
    "none": {"always": False},
    "other prompts": {"always": True, "sample_fraction": 1e-9},
    "energies of other prompts": {"source": "logit", "always": True, "sample_fraction": 1e-9},
}

OTHERS = "other prompts", "energies of other prompts"  # than the broken sample's, which is the second


def with_a_broken_sample(path: str, baseline: str) -> dict[str, tuple[torch.Tensor, bool, GradientStats]]:
    """Norms, whether the gradient is finite, and its statistics, by mode; one log-prob of sample 4 is NaN."""
    samples = make_samples()
    samples[4] = replace(samples[4], logprobs=(math.nan, *samples[4].logprobs[1:]))
    found = {}
    with layout() as parallel:
        energies = {"energies": MODES["two_pass"] | {"source": "logit"}}
        unmeasured = {name: MODES["two_pass"] | own for name, own in UNMEASURED.items()}
        for mode, gradnorm in (MODES | energies | unmeasured).items():
            if mode in ("inline", "energies", *UNMEASURED) and baseline == "optimal":
                continue  # its norms come too late; its sum of energies is another
            config = config_of(path, {"mode": gradnorm["mode"]}, folds=4)
            own = config.gradnorm.model_copy(update={"always": True} | gradnorm)
            algo = config.algo.model_copy(update={"baseline": baseline})
            config = config.model_copy(update={"algo": algo, "gradnorm": own})
            policy = policy_of(path, parallel, config)
            step = next(step for step in range(1, 99) if mode not in OTHERS or not measured_prompts(config, step)[1])
            gradients = StepGradient(policy, config).begin(step)
            gradients.add(whole_step(Batch([], samples, scored())), EveryGroup(scored(), config))
            (stats,) = gradients.updates()
            finite = all(bool(parameter.main_grad.isfinite().all()) for _, parameter in policy.named_parameters())
            found[mode] = gradients.norms_sq.flatten(), finite, stats
    return found


@pytest.mark.parametrize("baseline", ["optimal", "rloo"])
def test_a_sample_with_nan_spoils_no_other(models: dict[str, str], baseline: str) -> None:
    """A baseline takes the median of the other norms for its norm, and its gradient is left out."""
    (found,) = run_ranks(with_a_broken_sample, 1, models["tied"], baseline)
    wanted = found["two_pass"][2]
    for mode, (norms, finite, stats) in found.items():
        assert norms.isfinite().logical_not().nonzero().flatten().tolist() == [4], mode
        assert finite, mode
        assert stats.sq_norm == pytest.approx(wanted.sq_norm, rel=RTOL), mode
        if mode not in ("stash", *TWINS):
            assert math.isfinite(stats.logprob_abs_diff), mode


SEQUENCE: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    1: [({}, {}), ({}, PACKED)],
    2: [({"cp": 2}, {}), ({"cp": 2}, PACKED), ({"tp": 2, "sp": True}, PACKED)],
}


def with_sequence_ratios(path: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for sizes, options in cases:
        with layout(**sizes) as parallel:
            config = config_of(path, {"mode": "bookkeep"}, folds=4, **options)
            rollout = config.rollout.model_copy(update={"importance_sampling": "sequence"})
            metrics = step_of(path, parallel, config.model_copy(update={"rollout": rollout}))
            del metrics["gradient"]
            found.append(metrics)
    return found


def test_ratios_of_whole_responses_do_not_depend_on_the_layout(models: dict[str, str]) -> None:
    """The product runs over a response's tokens on all ranks, and over no other response in its row."""
    wanted, *others = run_ranks(with_sequence_ratios, 1, models["untied"], SEQUENCE[1])[0]
    others += [found for rank in run_ranks(with_sequence_ratios, 2, models["untied"], SEQUENCE[2]) for found in rank]
    assert not torch.allclose(wanted["norms"], expected(models["untied"])["norms"], rtol=1e-3)  # of single tokens
    for found in others:
        torch.testing.assert_close(found["norms"], wanted["norms"], rtol=RTOL, atol=0)
        assert found["stats"] == pytest.approx(wanted["stats"], rel=RTOL)


def with_a_fold_for_each_prompt(path: str) -> list[dict[str, Any]]:
    found = []
    for gradnorm in (MODES["stash"], MODES["bookkeep"], MODES["two_pass"]):
        with layout() as parallel:
            config = config_of(path, gradnorm, folds=2)
            snr = config.algo.snr.model_copy(update={"estimator": "prompts"})
            algo = config.algo.model_copy(update={"snr": snr})
            found.append(step_of(path, parallel, config.model_copy(update={"algo": algo}))["stats"])
    return found


def test_the_prompts_estimator_takes_every_prompt_as_a_fold(models: dict[str, str]) -> None:
    wanted = expected(models["untied"])["stats"]  # its folds are the four prompts
    for rank in run_ranks(with_a_fold_for_each_prompt, 2, models["untied"]):
        for stats in rank:
            assert stats == pytest.approx(wanted, rel=RTOL)
