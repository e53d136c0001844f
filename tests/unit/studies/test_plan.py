"""Plans: valid keys, merged settings, one-line errors. Sweeps: the next rate and the best one.

Not covered: that a run with an arm's settings learns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from oblr_megatron.config.algo import AlgoConfig
from oblr_megatron.errors import UserError
from studies.plan import Plan, load_plan
from studies.sweep import Cell, choose, select

EXAMPLES = Path(__file__).parents[3] / "examples/study"
HEAD = """
tasks = ["sums"]
num_steps = 100
evaluate_every = 10
learning_rates = [1e-2, 1e-3]
reference = "ours"
"""
ARMS = """
[defaults]
algo.snr.horizon = 30
[arms.ours]
algo.preset = "oblr_pooled"
[arms.paper]
algo.preset = "oblr_po"
"algo.snr.warmup_steps" = 3
optimizer.name = "sgd"
[arms.rloo]
peer = true
algo.preset = "rloo"
learning_rates = [1e-4]
"""


def plan_of(text: str, tmp_path: Path) -> Plan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path)


def test_settings_are_merged(tmp_path: Path) -> None:
    plan = plan_of(f"seeds = 3\n{HEAD}{ARMS}", tmp_path)
    assert plan.seeds == (0, 1, 2)
    assert plan.grid("ours") == (1e-3, 1e-2) and plan.grid("rloo") == (1e-4,)
    assert [plan.swept(arm) for arm in plan.arms] == [True, True, False]
    assert plan.algo("ours")["snr"] == {"horizon": 30}
    paper = AlgoConfig.model_validate(plan.algo("paper"))
    assert (paper.baseline, paper.snr.estimator, paper.snr.horizon) == ("optimal", "plugin", 1.0)  # over [defaults]
    assert paper.snr.warmup_steps == 3  # the arm's own over its preset's
    assert plan.optimizer("paper") == {"name": "sgd"} and plan.optimizer("rloo") == {}


def test_selected_arms_and_tasks(tmp_path: Path) -> None:
    plan = plan_of(HEAD + ARMS, tmp_path)
    assert list(plan.only(["rloo", "ours"]).arms) == ["ours", "rloo"]
    assert plan.fewest_runs() == 2 * 2 * 2 + 3 * 5  # rates x sweep seeds of the arms with two rates, and all seeds
    with pytest.raises(UserError, match=r"'roo' \[--only\]"):
        plan.only(["roo"])
    assert plan.only(tasks=plan.tasks[:1]).tasks == plan.tasks[:1] and plan.only().arms == plan.arms
    with pytest.raises(UserError, match=r"'roo' \[--tasks\]"):
        plan.only(tasks=["roo"])
    assert plan.compared_with("rloo").reference == "rloo" != plan.compared_with(None).reference == plan.reference
    with pytest.raises(UserError, match=r"'roo' \[--reference\]"):
        plan.compared_with("roo")


def test_the_example_plans() -> None:
    """`load_plan` checks that all arms have the same samples; here: what the comparison must contain."""
    plans = {path.stem: load_plan(path) for path in EXAMPLES.glob("*.toml")}
    main = plans["pooled"]
    assert len(main.seeds) == 10 and sum(task.startswith("gym_") for task in main.tasks) >= 6
    everywhere = set.intersection(*(set(main.arms_on(task)) for task in main.tasks))
    assert {"pooled", "pooled_mean", "none", "rloo", "grpo"} <= everywhere
    assert all(len(main.shapes_of(arm)) >= 2 for arm in ("pooled", "rloo", "grpo"))
    assert [arm for arm in main.arms if main.arms[arm].more_samples > 1] == ["rloo_twice"]
    assert {arm.backend for arm in plans["pooled_stack"].arms.values()} == {"toy", "train", "trl_grpo", "trl_rloo"}
    real = plans["smollm2"]
    assert set(real.recipes) == set(real.tasks) and real.arms["tempered"].algo["norm_power"] == 0.25
    later = {arm for arm in real.arms if arm.endswith("_32x2")}  # a third shape for published methods
    assert all(real.shapes_of(arm) == ((32, 2),) and real.arms[arm].peer for arm in later)
    tokens = real.arms["grpo_tokens"]  # with the divisor of TRL's loss, at the cell that both have chosen
    assert tokens.algo["aggregation"] == "token_mean" and tokens.peer and real.shapes_of("grpo_tokens") == ((16, 4),)
    later |= {"grpo_tokens"}
    assert all(len(real.shapes_of(arm)) == 2 for arm in real.arms.keys() - later - {"lora"})
    assert all(len(real.grid(arm)) == 3 for arm in real.arms.keys() - later) and real.arms["lora"].model == {
        "lora": {"rank": 16}
    }
    tempered = plans["tempered"]
    assert len(tempered.seeds) == 10 and len(tempered.sweep_seeds) == 3 and len(tempered.tasks) == 11
    peers = {name for name in tempered.arms_on("mixed") if tempered.arms[name].peer}
    assert {"spo", "opob", "dbb", "vl_norm", "james_stein", "reinforce_pp", "rloo", "grpo"} <= peers
    for name, plan in plans.items():
        assert plan.reference == ("tempered" if "tempered" in name else "pooled") and not set(plan.seeds) & set(
            plan.sweep_seeds
        )
        assert len(plan.seeds) >= (3 if name == "smollm2" else 5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (HEAD + ARMS + "pear = true", ["unknown key 'arms.rloo.pear'", "did you mean 'peer'?"]),
        (HEAD + ARMS + "algo.baselin = 'rloo'", ["unknown key 'baselin'", "arms.rloo.algo", "did you mean 'baseline'"]),
        (HEAD + ARMS + "optimizer.lr = 1.0", ["optimizer.lr", "arms.rloo", "learning_rates"]),
        (HEAD + ARMS + "algo.snr.num_folds = 3", ["16 prompts", "num_folds 3"]),
        (HEAD + ARMS + "shapes = ['16x4']", ["shape 16x4 has 64 samples a step instead of 128", "arms.rloo"]),
        (HEAD + ARMS + "shapes = ['16x8']\nmore_samples = 2", ["has 128 samples a step instead of 256"]),
        (HEAD + ARMS + "shapes = ['16by8']", ["arms.rloo.shapes"]),
        ("train_rows = 8\n" + HEAD + ARMS + "backend = 'train'", ["train_rows with backend 'train'", "arms.rloo"]),
        (HEAD + ARMS + "tasks = ['walk']", ["task 'walk' is not a task of the plan"]),
        (HEAD + ARMS + "rival = 'otb'", ["rival 'otb'", "algo.baseline 'rloo'", '"none"']),
        (HEAD + ARMS + "[recipes]\nsums = 'x.toml'", ["backend 'toy' cannot train the recipe 'sums'", "arms.ours"]),
        (HEAD + ARMS + "backend = 'train'\nmodel.lora.rank = 4", ["'rank': 4", "is no recipe", "arms.rloo"]),
        ("model.dtype = 'float32'\n" + HEAD + ARMS, ["'dtype': 'float32'", "without a recipe"]),
        (HEAD + ARMS + "[recipes]\nother = 'x.toml'", ["recipe 'other' is not a task of the plan"]),
        (HEAD, ["'arms' is missing"]),
        (HEAD.replace("ours", "his") + ARMS, ["reference 'his'", "ours, paper"]),
        ("pairs = [['ours', 'his']]" + HEAD + ARMS, ["'his' in pairs is not an arm", "ours, paper"]),
        (HEAD.replace("= 10\n", "= 30\n") + ARMS, ["num_steps 100", "evaluate_every 30"]),
        ("seeds = [0, 1]\nsweep_seeds = [1, 2]" + HEAD + ARMS, ["seed 1", "sweep_seeds"]),
        ("seeds = [1, 1]" + HEAD + ARMS, ["seeds", "twice"]),
        ("seeds = 0" + HEAD + ARMS, ["seeds"]),
        ("seeds = '5'" + HEAD + ARMS, ["seeds"]),
        ("tasks = ", ["TOML"]),
    ],
)
def test_mistakes_end_in_one_line(text: str, named: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(text, tmp_path)
    assert "\n" not in str(caught.value) and caught.value.fix
    assert all(part in str(caught.value) for part in named), caught.value


def test_a_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml\]"):
        load_plan(tmp_path / "none.toml")


def test_a_best_rate_inside_the_grid_is_taken() -> None:
    choice = choose((1.0, 2.0, 4.0), 2, {1.0: 0.1, 2.0: 0.3, 4.0: 0.2})
    assert (choice.best, choice.on_edge, choice.missing) == (2.0, False, ())


def test_a_grid_grows_while_its_best_lies_on_the_edge_up_to_the_limit() -> None:
    means = {1.0: 0.1, 2.0: 0.3}
    assert choose((1.0, 2.0), 2, means).missing == (4.0,)
    assert choose((1.0, 2.0), 2, means | {4.0: 0.2}).best == 2.0
    assert choose((1.0, 2.0), 2, means | {4.0: 0.4}).missing == (8.0,)
    last = choose((1.0, 2.0), 2, means | {4.0: 0.4, 8.0: 0.5})
    assert (last.best, last.on_edge, last.rates) == (8.0, True, (1.0, 2.0, 4.0, 8.0))
    assert choose((1.0, 2.0), 1, {1.0: 0.3, 2.0: 0.1}).missing == (0.5,)
    assert choose((1.0, 2.0), 0, means).best == 2.0 and choose((1.0, 2.0), 0, means).on_edge


def test_a_rate_that_failed_is_never_the_best_and_bounds_the_grid() -> None:
    nan = float("nan")
    choice = choose((1.0, 2.0, 4.0), 2, {1.0: 0.1, 2.0: 0.3, 4.0: nan})
    assert choice.best == 2.0 and not choice.on_edge
    assert choose((1.0, 2.0), 2, {1.0: nan, 2.0: nan}).best is None


def test_the_best_rate_is_refined() -> None:
    means = {1.0: 0.1, 2.0: 0.3, 4.0: 0.2}
    assert choose((1.0, 2.0, 4.0), 2, means, 1).missing == (1.41, 2.83)
    last = choose((1.0, 2.0, 4.0), 2, means | {1.41: 0.4, 2.83: 0.1}, 1)
    assert (last.best, last.on_edge, last.rates) == (1.41, False, (1.0, 1.41, 2.0, 2.83, 4.0))
    assert choose((1.0, 2.0), 0, {1.0: 0.1, 2.0: 0.3, 1.41: 0.2}, 1).on_edge


def test_a_single_cell_needs_no_sweep() -> None:
    assert select([(8, 8)], (3.0,), 2, 1, {}).best == Cell(8, 8, 3.0)
    assert select([(8, 8), (32, 2)], (3.0,), 2, 0, {}).best is None
