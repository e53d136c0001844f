"""Responses that the reward cannot score: in a run and in `eval`.

The engine repeats the prompts; the rewards fail as told, and one is a service that is down. Not covered: real engines,
several ranks (every rank gets the same result, see tests/distributed/test_shared_reward.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oblr_megatron.config import Config, RewardConfig, parse_config
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.errors import RunError
from oblr_megatron.evaluation import session
from oblr_megatron.evaluation.accuracy import metrics
from oblr_megatron.evaluation.answers import evaluate
from oblr_megatron.evaluation.items import RunItems
from oblr_megatron.observe.step_metrics import StepRecord
from oblr_megatron.rewards.base import Reward, RewardResult
from oblr_megatron.rewards.combined import CombinedReward, Term
from oblr_megatron.rewards.registry import build_reward
from oblr_megatron.sampling import Sampling
from oblr_megatron.types import Prompt, Sample
from tests.tiny import make_hf_dir
from tests.unit.rewards.http_service import score_batch, serving

PROMPTS = [Prompt(n, name, name, (n,), name, "t") for n, name in enumerate("abc")]
SMALL = {"num_prompts": 1, "group_size": 2, "algo.snr.num_folds": 1, "evaluate.samples_per_prompt": 2}
# Of three prompts: greedy blocks of 2 and 1 responses, three sampled blocks of 2.
ACCURACIES = ("accuracy", "mean_at_k", "pass_at_k")


class Echo:
    """Every response is its prompt. Counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def generate(self, prompts: Sequence[Prompt], request: SamplingRequest) -> list[Sample]:
        self.calls += 1
        size = 1 if request.greedy else request.group_size
        texts = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(size)]
        return [Sample(group, one.token_ids, (1,), (0.0,), one.text, "stop", 0) for group, one in texts]


class Failing(Reward):
    """1, or late for the responses with these numbers, counted over all calls."""

    def __init__(self, *late: int) -> None:
        self.late, self.seen = late, 0

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> RewardResult:
        numbers = range(self.seen, self.seen + len(samples))
        self.seen += len(samples)
        faults = {place: "late" for place, number in enumerate(numbers) if number in self.late}
        return RewardResult([float(number not in self.late) for number in numbers], faults=cast(Any, faults))


def config(**values: object) -> Config:
    overrides = [f"{key}={value}" for key, value in {**SMALL, **values}.items()]
    table = {"run_dir": "run", "model": {"path": "m"}, "data": {"train": "t"}}
    return parse_config(table | {"evaluate": {"data": {"s": "s.jsonl"}, "every_steps": 1}}, "test", overrides)


def in_training(reward: Reward, directory: Path | None = None, rank: int = 0) -> dict[str, float]:
    """The metrics of an evaluation of a run."""
    run = SimpleNamespace(
        config=config(),
        held_out={"s": PROMPTS},
        timer=lambda phase: nullcontext(),
        evaluations=RunItems(directory),
        engines=Echo(),
        reward=reward,
        trackers=SimpleNamespace(table=lambda *_: None),
        parallel=SimpleNamespace(rank=rank),
        evaluation_due=lambda step: True,
    )
    record = StepRecord(done=0)
    Sampling.evaluate(cast(Any, run), record)
    return {name.removeprefix("eval/s/"): value for name, value in record.metrics.items()}


def test_a_run_counts_unscored_responses(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    found = in_training(Failing(1, 3), tmp_path)
    assert found["unscored"] == 2 and found["accuracy"] == pytest.approx(2 / 3) and not caplog.records
    lines = (tmp_path / "step_000000" / "s.jsonl").read_text().splitlines()
    assert [number for number, line in enumerate(lines) if json.loads(line).get("scored") is False] == [1, 3]
    assert in_training(Failing())["unscored"] == 0


@pytest.mark.parametrize(
    ("late", "absent"),
    [(range(9), set(ACCURACIES)), (range(3), {"accuracy"}), (range(3, 9), {"mean_at_k", "pass_at_k"})],
)
def test_a_run_leaves_out_what_no_scored_response_tells(
    late: range, absent: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = in_training(Failing(*late))
        assert in_training(Failing(*late), rank=1) == found, "other ranks are silent"
    assert absent == set(ACCURACIES) - found.keys() and found["unscored"] == len(late)
    assert found["response_length"] == 1
    (line,) = caplog.messages
    assert "'s'" in line and "reward.timeout_s" in line and "\n" not in line


def test_a_service_that_is_down_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """Each of five requests fails at once, and is repeated until its deadline."""
    with serving(score_batch) as service:
        options = {"name": service.url, "num_workers": 1, "timeout_s": 1.0}
        reward = build_reward(RewardConfig.model_validate(options), max_response_tokens=16)
    with caplog.at_level(logging.WARNING), reward:
        found = in_training(reward)
    assert found["unscored"] == 9 and found.keys().isdisjoint(ACCURACIES)
    assert len(caplog.messages) == 1 and service.url in caplog.messages[0]


def test_a_failed_side_term_does_not_unscore_the_main_one() -> None:
    for place, unscored in ((0, 9), (1, 0)):
        terms = [Term(name, 1.0, Failing(*(range(9) if number == place else ()))) for number, name in enumerate("mn")]
        found = in_training(CombinedReward(terms))
        assert found["unscored"] == unscored and ("accuracy" in found) is (unscored == 0)


def test_a_strict_evaluation_raises_before_the_sink_gets_a_block_without_scores() -> None:
    written: list[int] = []
    sink = lambda first, items: written.append(first)  # noqa: E731
    with pytest.raises(RunError, match=r"'s'.*last 2 responses: .*reward.timeout_s") as caught:
        evaluate("s", cast(Any, Echo()), PROMPTS, Failing(3, 4), config(), sink=sink, strict=True)
    assert written == [0, 2] and "\n" not in str(caught.value)
    evaluate("s", cast(Any, Echo()), PROMPTS, Failing(3, 5, 7), config(), strict=True)
    with pytest.raises(RunError):
        evaluate("s", cast(Any, Echo()), PROMPTS, Failing(0, 1), config(), strict=True)


def test_one_bad_response_alone_in_its_block_is_only_counted() -> None:
    grades = evaluate("s", cast(Any, Echo()), PROMPTS, Failing(2), config(), strict=True)
    assert metrics(grades)["unscored"] == 1
    assert [one.scored for one in grades.greedy] == [True, True, False]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("unscored") / "model", head_dim=32)


class Command:
    """`eval --out`, with other parts in place of engine and reward."""

    def __init__(self, model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.out = monkeypatch, root / "out"
        rows = root / "s.jsonl"
        rows.write_text("".join(json.dumps({"question": f"t{n}", "answer": f"t{n}"}) + "\n" for n in range(3)))
        given = {"config": None, "k": 2, "out": self.out, "json": None, "model": model, "adapter": None}
        lengths = ["data.max_prompt_tokens=24", "rollout.max_response_tokens=40", "reward.name=exact_match"]
        keys = [f"{key}={value}" for key, value in SMALL.items() if "samples" not in key]
        self._options = cast(Any, SimpleNamespace(**given, data=[str(rows)], overrides=[*lengths, *keys]))

    def __call__(self, *late: int) -> int:
        """Run it; the number of blocks that were sampled."""
        engine = Echo()

        @contextmanager
        def opened(config: Config, adapter: object) -> Iterator[tuple[Echo, Reward]]:
            yield engine, Failing(*late)

        self._monkeypatch.setattr(session, "opened", opened)
        session.run(session.check(self._options))
        return engine.calls

    @property
    def lines(self) -> list[bytes]:
        file = self.out / "s.jsonl"
        return file.read_bytes().splitlines() if file.exists() else []

    @property
    def figures(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "figures.json").read_text())["sets"]["s"])


@pytest.fixture
def command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(model, tmp_path, monkeypatch)


def test_a_reward_that_is_down_leaves_nothing_in_out(command: Command) -> None:
    with pytest.raises(RunError, match="'s'"):
        command(*range(9))
    assert command.lines == []


def test_blocks_before_the_failure_stay(command: Command) -> None:
    with pytest.raises(RunError):
        command(*range(3, 9))
    assert len(command.lines) == 3 and not (command.out / "figures.json").exists()


def test_unscored_responses_are_counted(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(1, 6) == 5
    assert command.figures["unscored"] == 2 and command.figures["accuracy"]["value"] == pytest.approx(2 / 3)
    assert "2 responses unscored" in capsys.readouterr().out
