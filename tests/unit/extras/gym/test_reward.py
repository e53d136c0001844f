"""The reward "reasoning_gym": the tasks' own scores, through the worker processes.

The oracle is the package, called directly. Not covered: all tasks (test_rows.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.utils import extract_answer

from oblr_megatron.config import RewardConfig, parse_config, with_own_scores
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.errors import UserError
from oblr_megatron.extras.gym import rows as gym
from oblr_megatron.extras.gym.reward import EVALUATED, extracted, make_task, score, warm_up
from oblr_megatron.rewards.registry import build_reward, check_reward, check_rows, data_for, takes_rows
from oblr_megatron.types import Prompt, Sample

PIECES = ["<answer>", "</answer>", "<answer", " ", "\n", "4", "a<b"]


def rows(name: str, size: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Generated in this process."""
    source = SourceConfig.model_validate({"path": f"reasoning_gym:{name}", "size": size, "options": options})
    request = json.dumps(gym.request_of(source, training=True))
    return [row for index in range(size) if isinstance(row := json.loads(gym.row(request, str(index))), dict)]


def asked(given: list[tuple[dict[str, Any], list[str]]]) -> tuple[list[Prompt], list[Sample]]:
    """Prompts of rows, and prompt-major samples of their responses."""
    prompts = [
        Prompt(q, str(q), row["question"], (q,), row["answer"], "", columns=json.dumps(row))
        for q, (row, _) in enumerate(given)
    ]
    samples = [Sample(q, (q,), (1,), (0.0,), text, "stop", 0) for q, (_, texts) in enumerate(given) for text in texts]
    return prompts, samples


def config(**reward: Any) -> RewardConfig:
    return RewardConfig.model_validate(reward)


def test_a_mixture_is_scored_by_its_tasks() -> None:
    [gcd, *_], [word, *_] = rows("gcd"), rows("spell_backward", min_word_len=4, max_word_len=4)
    near = word["answer"][:-1] + "!"
    grids = rows("arc_1d", 1)
    responses = [
        (gcd, [f"so <answer> {gcd['answer']} </answer>", gcd["answer"], "<answer>no</answer>"]),
        (word, [f"<answer>{word['answer']}</answer>", f"<answer>{near}</answer>", "<answer>"]),
        (grids[0], [f"<answer>{grids[0]['answer']}</answer>", "<answer>\n</answer>", ""]),
    ]
    with build_reward(config(name="reasoning_gym", num_workers=1), max_response_tokens=16) as reward:
        result = reward.score(*asked(responses))
    assert result.rewards == [1.0, 0.0, 0.0, 1.0, 0.75, 0.0, 1.0, 0.0, 0.0]
    assert result.faults == {} and result.answers is not None
    assert result.answers[:3] == [gcd["answer"], None, "no"] and result.answers[4] == near


def test_the_whole_response_is_scored_on_request() -> None:
    [row] = rows("gcd", 1)
    with build_reward(config(name="reasoning_gym:whole", num_workers=1), max_response_tokens=16) as reward:
        result = reward.score(*asked([(row, [f" {row['answer']}\n", f"<answer>{row['answer']}</answer>", " "])]))
    part = reasoning_gym.get_score_answer_fn("gcd")(f"<answer>{row['answer']}</answer>", row)
    assert result.rewards == [1.0, part, 0.0] and 0 < part < 1 and result.answers is not None
    assert result.answers[2] is None


def test_rows_of_elsewhere_and_late_scorers_cost_their_samples_only() -> None:
    """A sudoku is late, because building its task and importing sympy take longer than a millisecond."""
    [row] = rows("gcd", 1)
    other = {"question": "1+1", "answer": "2"}
    right = f"<answer>{row['answer']}</answer>"
    with build_reward(config(name="reasoning_gym", num_workers=1), max_response_tokens=16) as reward:
        result = reward.score(*asked([(row, [right, right]), (other, ["<answer>2</answer>", "2"])]))
    assert result.rewards == [1.0, 1.0, 0.0, 0.0] and result.faults == {2: "failed"}
    assert "reasoning_gym" in result.cause
    with build_reward(config(name="reasoning_gym", num_workers=1, timeout_s=1e-6), max_response_tokens=16) as reward:
        result = reward.score(*asked([(row, [right])]))
    assert result.rewards == [0.0] and result.timeouts == 1


def test_answers_that_a_task_cannot_parse_score_zero() -> None:
    [row] = rows("prime_factorization", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        make_task("prime_factorization", {}).score_answer("foo", row)
    assert score("foo", row) == 0.0 and score(row["answer"], row) == 1.0


@pytest.mark.parametrize("name", [*EVALUATED, "binary_matrix", "spiral_matrix", "string_insertion", "n_queens"])
def test_answers_are_not_run(name: str, tmp_path: Any) -> None:
    """The package evaluates answers of these tasks; here an answer that writes a file writes none."""
    warm_up()
    [row] = rows(name, 1)
    code = f"open({f'{tmp_path}/ran'!r}, 'w')"
    for answer in (
        f"eval({'+'.join(f'chr({ord(letter)})' for letter in code)})",
        "sin('" + "".join(f"\\{ord(letter):03o}" for letter in code) + "')",
        f"__import__('pathlib').Path('{tmp_path}/ran').touch()",
        f"[open('{tmp_path}/ran', 'w')]",
        f"open('{tmp_path}/ran', 'w')",
    ):
        assert score(answer, row) < 0.1
    assert list(tmp_path.iterdir()) == [] and score(row["answer"], row) == 1.0


@pytest.mark.slow
def test_right_formulas_keep_their_scores() -> None:
    """The package's own answers, and a form that models may give."""
    for name in EVALUATED:
        for row in rows(name, 6):
            expected = 0.0 if "Integral" in row["answer"] else 1.0  # the package's answer repeats the question
            assert score(row["answer"], row) == expected, row
    [row] = rows("simple_integration", 1)
    half = f"({row['answer'].replace(' + C', '')})*Rational(2, 2) + sqrt(4)*C + exp(1)*pi"
    assert score(half, row) == 1.0


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_answer_is_the_one_that_the_package_extracts(response: str) -> None:
    """Of a text with an <answer> that was left open, the package takes all of it."""
    whole = extract_answer(response)
    assert extracted(response) == (None if whole is None else whole.rpartition("<answer>")[2].strip())


def table(train: object, **more: Any) -> dict[str, Any]:
    return {"run_dir": "run", "model": {"path": "model"}, "data": {"train": train}, **more}


def test_generated_rows_are_scored_by_their_tasks_unless_a_reward_is_named() -> None:
    source = "reasoning_gym:gcd"
    default = parse_config(table(source))
    assert default.reward.name == "reasoning_gym" and data_for(default).keep_columns
    assert parse_config(default.model_dump(mode="json")) == default
    assert parse_config(table(source, reward={"name": "math"})).reward.name == "math"
    whole = "reasoning_gym:whole"
    assert parse_config(table(source), overrides=[f"reward.name={whole}"]).reward.name == whole
    assert parse_config(table([source, "rows.jsonl"])).reward.name == "math"
    shaped = parse_config(table(source, reward={"timeout_s": 3.0, "terms": [{"name": "overlong"}]})).reward
    assert (shaped.name, shaped.timeout_s, shaped.terms[0].name) == ("reasoning_gym", 3.0, "overlong")
    stored = parse_config(table("rows.jsonl"))
    assert with_own_scores(stored, [SourceConfig(path=source)]).reward.name == "reasoning_gym"


def test_rows_of_another_source_are_refused() -> None:
    sources = [SourceConfig(path="reasoning_gym:gcd"), SourceConfig(path="rows.jsonl")]
    for reward in (config(name="reasoning_gym"), config(terms=[{"name": "reasoning_gym:whole"}])):
        assert takes_rows(reward)
        check_rows(reward, sources[:1])
        with pytest.raises(UserError) as caught:
            check_rows(reward, sources)
        assert "rows.jsonl" in caught.value.what and caught.value.where == "config: reward"
    check_rows(config(name="math"), sources)


def test_the_reward_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oblr_megatron.checks.packages.installed_version", lambda distribution: None)
    with pytest.raises(UserError) as caught:
        check_reward(config(name="reasoning_gym"), max_response_tokens=16)
    assert caught.value.where == "config: reward.name" and "[gym]" in caught.value.fix
