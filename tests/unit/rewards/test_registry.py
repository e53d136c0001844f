"""Rewards by name: known names, user functions, and errors before the run starts.

Not covered: scores of the mathematical reward (test_math.py), failing workers (test_pool.py), functions of many
responses (test_functions.py), services (test_http.py), sums, format and overlong (test_combined.py),
reasoning-gym (test_gym.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import Reward, RewardOfEpisodes, SampleReward
from oblr_megatron.rewards.combined import CombinedReward, Term
from oblr_megatron.rewards.registry import GYM_REWARDS, REWARDS, build_reward, check_reward, one_line
from tests.unit.processes.conftest import unhurried
from tests.unit.rewards.conftest import batch

SCORERS = "tests.unit.processes.scorers"


def config(name: str, **values: object) -> RewardConfig:
    return RewardConfig.model_validate({"name": name, **values})


def build(name: str, **values: object) -> Reward:
    return build_reward(config(name, **values), max_response_tokens=16)


def check(name: str) -> None:
    check_reward(config(name), max_response_tokens=16)


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - {"environment", "format", "overlong", *GYM_REWARDS}))
def test_every_known_reward_separates_right_from_wrong(name: str) -> None:
    right = {"exact_match": "4", "math": r"\boxed{4}", "math:gsm8k": "2 + 2 = 4\n#### 4", "math:last_line": "so:\n4"}
    check(name)
    with build(name) as reward:
        result = reward.score(*batch([("4", [right[name], "5"]), ("7", [right[name], ""])]))
    assert result.rewards == [1, 0, 0, 0]
    assert (result.failures, result.timeouts) == (0, 0)


def test_the_environments_reward_is_the_reward() -> None:
    """A failed episode and one without a reward score 0 and are counted; one that was cut scores 0."""
    prompts, samples = batch([("", ["a"] * 6)])
    reasons = ("stop", "length", "length", "stop", "failed", "late")
    given = (0.5, -2.0, None, None, None, None)
    samples = [
        replace(sample, finish_reason=reason, environment_reward=value)
        for sample, reason, value in zip(samples, reasons, given, strict=True)
    ]
    with RewardOfEpisodes(build("environment")) as reward:
        result = reward.score(prompts, samples)
    assert result.rewards == [0.5, -2.0, 0, 0, 0, 0]
    assert result.faults == {3: "failed", 4: "failed", 5: "late"} and result.error


def test_an_episode_without_a_sample_has_no_reward_of_any_kind() -> None:
    """A reward of its text would take an outage of the environment for wrong answers."""
    prompts, samples = batch([("", ["", "a", ""])])
    samples = [replace(one, finish_reason=why) for one, why in zip(samples, ("failed", "stop", "late"), strict=True)]
    length = SampleReward(lambda sample: 1.0 + len(sample.text))
    whole = CombinedReward([Term("length", 1.0, length), Term("environment", 1.0, build("environment"))])
    result = RewardOfEpisodes(whole).score(prompts, samples)
    assert result.rewards == [0, 2, 0] and result.main_rewards == [0, 2, 0]
    assert result.unscored == {0, 2} and result.faults == {0: "failed", 1: "failed", 2: "late"}
    assert "episode" in (RewardOfEpisodes(length).score(prompts, samples).error or "")


def test_exact_match_ignores_white_space_only() -> None:
    assert one_line(" 4 \n") == "4" and one_line("a  b") == one_line("a\tb")
    assert len({one_line(text) for text in ("4.0", "4", "4 2", "42", "A", "a")}) == 6


def test_a_function_gets_response_answer_and_prompt() -> None:
    with build(f"{SCORERS}:length_share") as reward:
        result = reward.score(*batch([("gold", ["x" * 3, "x" * 6])]))
    assert result.rewards == [3 / len("goldprompt 0"), 6 / len("goldprompt 0")]


def test_failures_score_zero_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch, "sleep")
    responses = ["fine", "raise", "nan", "text", "die", "sleep", "fine"]
    with build(f"{SCORERS}:mixed", timeout_s=2.0) as reward:
        result = reward.score(*batch([("", responses)]))
        again = reward.score(*batch([("", ["raise", "fine"])]))
    assert result.rewards == [1, 0, 0, 0, 0, 0, 1]
    assert (result.failures, result.timeouts) == (4, 1)
    assert result.faults == {1: "failed", 2: "failed", 3: "failed", 4: "failed", 5: "late"}
    assert (again.rewards, again.failures) == ([0, 1], 1)
    assert "Traceback" in (result.error or "") and "no such answer" in (result.error or "")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("no_such_reward", "'no_such_reward'"),
        ("no_such_package.rewards:score", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{SCORERS}:no_such_function", "no_such_function"),
        (f"{SCORERS}:NOT_A_FUNCTION", "not callable"),
        (f"{SCORERS}:by_position", "(one, gold)"),
        (f"{SCORERS}:", f"'{SCORERS}:'"),
        (":score", "':score'"),
        ("", "''"),
    ],
)
def test_errors_for_wrong_names(name: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        check(name)
    assert named in caught.value.what and "\n" not in str(caught.value)
    assert caught.value.where == "config: reward.name"


@pytest.mark.parametrize(
    ("module", "text", "named"),
    [("broken_rewards", "1 / 0", "ZeroDivisionError"), ("exiting_rewards", "import sys\nsys.exit(0)", "SystemExit: 0")],
)
def test_a_module_that_fails_when_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, text: str, named: str
) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=named):
        check(f"{module}:score")


def test_a_module_in_the_current_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, answer, prompt):\n    return 0.25\n")
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    monkeypatch.chdir(tmp_path)
    check("my_rewards:score")
    with build("my_rewards:score") as reward:
        assert reward.score(*batch([("", [""])])).rewards == [0.25]


def test_samples_must_belong_to_their_prompts() -> None:
    prompts, samples = batch([("1", ["1", "2"]), ("2", ["1", "2"])])
    with build("exact_match") as reward:
        assert reward.score(prompts, samples).rewards == [1, 0, 0, 1]
        assert reward.score(prompts[1:], samples[2:]).rewards == [0, 1], "a part of a step"
        with pytest.raises(AssertionError, match="3 samples"):
            reward.score(prompts, samples[:3])
        with pytest.raises(AssertionError, match=r"group 1 .* 'p0'"):
            reward.score(prompts, samples[::-1])
