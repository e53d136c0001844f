"""A user's baseline: facts are read from its function, a fact that does not hold is found, errors take one line.

The functions of this file are the user's. Not covered: whole runs (tests/distributed/test_user_baseline.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oblr_megatron import baseline
from oblr_megatron.algo.baseline import active_groups, advantages, baseline_values
from oblr_megatron.algo.formulas import FORMULAS, History
from oblr_megatron.algo.user_baseline import check_baseline
from oblr_megatron.algo.weighting import mean_of_others
from oblr_megatron.config import Config, parse_config
from oblr_megatron.config.baselines import BASELINES, facts_of
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.memory.select_mode import resolve
from tests.tiny import tiny_config

PAGE = Path(__file__).parents[3] / "docs" / "algorithm.md"
Q, G = 4, 4


def named(function: str) -> str:
    return f"{__name__}:{function}"


@baseline(over="others", needs_norms=True)
def weighted(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """A copy of `optimal`."""
    return mean_of_others(rewards, norms_sq)


@baseline(over="others")
def plain(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    return (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


@baseline(over="nothing", prior=True)
def of_other_prompts(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    means = rewards.mean(1, keepdim=True)
    return ((means.sum() - means) / (len(means) - 1)).expand_as(rewards)


@baseline(over="nothing", divisor="group_std")
def half(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    return torch.full_like(rewards, 0.5)


def mean(values: Tensor) -> Tensor:
    """Of each group [Q, G]."""
    return values.mean(1, keepdim=True).expand_as(values)


def others(values: Tensor) -> Tensor:
    """The mean of the other responses to the prompt."""
    return mean_of_others(values, torch.ones_like(values))


def spread(rewards: Tensor) -> Tensor:
    """Of the prompts' means, as a share of the whole: 0 / 0 once all answers are right."""
    within, between = rewards.var(1, keepdim=True), rewards.mean(1).var()
    return between / (between + within)


def raising(error: BaseException) -> Callable[..., Tensor]:
    def function(*given: Any) -> Tensor:
        raise error

    return function


# name: (facts, function of rewards r, norms w, lengths n and history h, what is said about it)
WRONG: dict[str, tuple[dict[str, Any], Callable[..., Any], str]] = {
    "includes_itself": (
        {"over": "others"}, lambda r, w, n, h: mean(r), 'reads the response that it is for, but declares over="others"'
    ),
    "is_the_median": (  # a small change of a reward changes no other value's median
        {"over": "others"},
        lambda r, w, n, h: r.quantile(0.5, dim=1, keepdim=True).expand_as(r),
        "reads the response that it is for",
    ),
    "weighs_itself": (  # o_i's reward is left out, but not its norm
        {"over": "others", "needs_norms": True},
        lambda r, w, n, h: others(r) + w / 100,
        "reads the response that it is for",
    ),
    "reads_its_length": (
        {"over": "others"}, lambda r, w, n, h: others(r) + n / 100, "reads the response that it is for"
    ),
    "hides_norms": (
        {"over": "others"},
        lambda r, w, n, h: mean_of_others(r, w),
        "reads the norms of its own step, but does not declare it",
    ),
    "reads_its_group": (
        {"over": "nothing"},
        lambda r, w, n, h: others(r),
        'reads the responses to its own prompt, but declares over="nothing"',
    ),
    "reads_other_prompts": (
        {"over": "others"}, lambda r, w, n, h: others(r) + (r.sum() / r.shape[1] - mean(r)) / 10, "reads other prompts"
    ),
    "reads_later_norms": (
        {"over": "group", "needs_norms": True, "prior": True},
        lambda r, w, n, h: ((w * r).sum() / w.sum().clamp(min=1e-9)).expand_as(r),
        "reads the norms of other prompts",
    ),
    "depends_on_the_order": ({"over": "group"}, lambda r, w, n, h: r[:, :1].expand_as(r), "in another order"),
    "takes_the_next": ({"over": "others"}, lambda r, w, n, h: r.roll(1, 1), "in another order"),
    "shrinks": ({"over": "others"}, lambda r, w, n, h: 0.9 * others(r), "in a group of equal rewards"),
    "at_random": ({"over": "batch"}, lambda r, w, n, h: torch.rand_like(r), "when it is called again"),
    "one_for_all": (
        {"over": "batch"}, lambda r, w, n, h: r.mean(), "returned torch.float64 [] for rewards torch.float64 [4, 4]"
    ),
    "single_precision": (
        {"over": "batch"}, lambda r, w, n, h: r.mean().float().expand_as(r), "returned torch.float32 [4, 4]"
    ),
    "number": ({"over": "batch"}, lambda r, w, n, h: float(r.mean()), "returned float"),
    "divides_by_zero": (
        {"over": "group", "needs_norms": True}, lambda r, w, n, h: mean(w * r) / mean(w), "NaN or infinite"
    ),
    "forgets_the_first_step": (  # it has a history of NaN
        {"over": "nothing", "pool": "plain"},
        lambda r, w, n, h: (torch.zeros_like(r[:, 0]) if h.expected is None else h.expected)[:, None].expand_as(r),
        "NaN or infinite",
    ),
    "shrinks_by_the_spread": (
        {"over": "others", "prior": True}, lambda r, w, n, h: others(r) * spread(r), "NaN or infinite"
    ),
    "fails": ({"over": "nothing"}, raising(KeyError("scale")), "raised KeyError: 'scale'"),
    "takes_two": ({"over": "nothing"}, lambda r, w: r, "raised TypeError"),
    "exits": ({"over": "nothing"}, raising(SystemExit(3)), "raised SystemExit: 3"),
}  # fmt: skip
of_users = SimpleNamespace(**{name: baseline(**facts)(function) for name, (facts, function, _) in WRONG.items()})


def undeclared(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    return rewards


@baseline(over="others", needs_norms=True, divisor="centred_std")
def divides_by_all(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    return mean_of_others(rewards, norms_sq)


@baseline(over="others")
def overwrites(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
    """Correct, though it changes its arguments."""
    total = rewards.sum(1, keepdim=True)
    return rewards.mul_(-1).add_(total).div_(rewards.shape[1] - 1)


def as_users(name: str) -> str:
    """A baseline of the package as a user's."""
    facts = BASELINES[name]

    @baseline(facts.over, needs_norms=facts.needs_norms, pool=facts.pool, prior=facts.prior, divisor=facts.divisor)
    def function(rewards: Tensor, norms_sq: Tensor, lengths: Tensor, history: History) -> Tensor:
        return FORMULAS[name](rewards, norms_sq, lengths, history)

    setattr(sys.modules[__name__], f"users_{name}", function)
    return named(f"users_{name}")


@pytest.mark.parametrize("name", BASELINES)
def test_the_facts_of_every_baseline_of_the_package_hold(name: str) -> None:
    own, facts = as_users(name), BASELINES[name]
    assert facts_of(own) == facts == facts_of(name)
    check_baseline(name, 2, 4)
    for num_prompts, group_size in ((2, 2), (5, 3), (1, 4), (3, 16), (4, 1)):
        if not (group_size == 1 and facts.needs_group) and not (num_prompts == 1 and facts.prior):
            check_baseline(own, num_prompts, group_size)


@pytest.mark.parametrize("function", ["weighted", "plain", "of_other_prompts", "overwrites"])
def test_correct_functions_pass(function: str) -> None:
    check_baseline(named(function), Q, G)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        *((f"of_users.{name}", said) for name, (_, _, said) in WRONG.items()),
        ("undeclared", "does not declare what it reads"),
        ("Q", "is not callable"),
        ("absent", "cannot be imported: AttributeError"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(function: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_baseline(named(function), Q, G)
    assert said in caught.value.what and named(function) in caught.value.what
    assert caught.value.where == "algo.baseline" and caught.value.fix and "\n" not in str(caught.value)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"cannot be imported: ModuleNotFoundError.*\[algo\.baseline\]"):
        configured("algo.baseline=nowhere:mean")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"over": "other"}, "over 'other' is unknown"),
        ({"over": "group", "pool": "mean"}, "pool 'mean' is unknown"),
        ({"over": "group", "divisor": "std"}, "divisor 'std' is unknown"),
        ({"over": "batch", "needs_norms": True}, "needs_norms=True with over='batch'"),
        ({"over": "nothing", "needs_norms": True}, "needs_norms=True with over='nothing'"),
    ],
)
def test_facts_that_make_no_sense(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        baseline(**facts)


def configured(*overrides: str) -> Config:
    return parse_config({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}, "here", overrides)


@pytest.mark.parametrize(
    ("function", "overrides", "said"),
    [
        ("plain", ["group_size=1"], "needs other responses in the group"),
        ("half", ["group_size=1"], "needs other responses in the group"),
        ("of_other_prompts", ["num_prompts=1", "algo.snr.num_folds=1"], "takes its prior from the other prompts"),
        ("of_other_prompts", ["rollout.overlap=stream"], "reads the rewards of all prompts"),
        ("weighted", ["gradnorm.sample_fraction=0.5"], "reads every norm of its step"),
        ("weighted", ["algo.updates_per_batch=2"], "norms measured before the first update"),
        ("divides_by_all", ["gradnorm.mode=stash"], "one pass knows the norms of some"),
        ("undeclared", [], "does not declare what it reads"),
    ],
)
def test_the_config_is_checked_with_the_facts(function: str, overrides: list[str], said: str) -> None:
    configured("algo.baseline=none", *overrides)
    with pytest.raises(UserError) as caught:
        configured(f"algo.baseline={named(function)}", *overrides)
    assert said in caught.value.what


def test_a_group_without_deviation_has_no_advantage() -> None:
    """r - b is 0.5 there, and 0.5 / 1e-6 would be the whole gradient."""
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    found = advantages(named("half"), rewards, torch.ones_like(rewards), torch.ones_like(rewards))
    assert found == pytest.approx(torch.tensor([[0.0, 0.0], [-(0.5**0.5), 0.5**0.5]]).double(), rel=1e-5)


def test_a_divisor_that_reads_all_norms_takes_two_passes() -> None:
    config = configured(f"algo.baseline={named('divides_by_all')}")
    check_baseline(config.algo.baseline, Q, G)
    assert resolve(tiny_config().to_dict(), config, 1).mode == "two_pass"


def test_what_is_neither_a_name_nor_a_function() -> None:
    with pytest.raises(UserError) as caught:
        configured("algo.baseline=optimum")
    assert caught.value.where == "command line" and "optimum" in caught.value.what
    assert "optimal" in caught.value.fix and "package.module:function" in caught.value.fix


@pytest.mark.parametrize(("function", "like"), [("weighted", "optimal"), ("plain", "rloo")])
def test_a_run_treats_it_like_a_baseline_with_these_facts(function: str, like: str) -> None:
    own, other = (configured(f"algo.baseline={name}") for name in (named(function), like))
    assert (own.uses_norms, own.measures_norms, bool(own.reads_own_norms)) == (
        other.uses_norms,
        other.measures_norms,
        bool(other.reads_own_norms),
    )
    hf_config = tiny_config().to_dict()
    assert resolve(hf_config, own, 1).mode == resolve(hf_config, other, 1).mode
    random = torch.Generator().manual_seed(0)
    rewards, norms = torch.rand(2, Q, G, generator=random, dtype=torch.float64)
    rewards[1] = rewards[1, 0]
    lengths = torch.full((Q, G), 5)
    found = advantages(own.algo.baseline, rewards, norms, lengths)
    torch.testing.assert_close(found, advantages(like, rewards, norms, lengths), rtol=1e-12, atol=1e-15)
    assert active_groups(own.algo.baseline, rewards).tolist() == [True, False, True, True]
    kept = rewards.clone()
    baseline_values(named("overwrites"), rewards, norms, lengths)
    assert rewards.equal(kept)


def test_a_value_that_is_not_finite_ends_a_run_in_one_line() -> None:
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(RunError, match=r"NaN or infinite.*\[algo\.baseline\]"):
        baseline_values(named("of_users.divides_by_zero"), zeros, zeros, zeros)


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "my_baselines.py").write_text(example, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    [name] = re.findall(r'baseline = "(my_baselines[^"]*)"', PAGE.read_text(encoding="utf-8"))
    assert configured(f"algo.baseline={name}").algo.baseline == name
    check_baseline(name, Q, G)
    rewards = torch.tensor([[0.0, 1, 4, 9]], dtype=torch.float64)
    assert baseline_values(name, rewards, rewards, rewards).tolist() == [[4.0, 4.0, 1.0, 1.0]]
