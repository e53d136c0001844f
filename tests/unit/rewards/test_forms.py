"""Reward functions in the forms of the wild: called with the right values, or refused with the names wanted.

`source` is the file or thread that shows the form, or what it is ours for. Not covered: services (test_http.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.errors import UserError
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.rewards.registry import build_reward, check_reward
from tests.unit.rewards.conftest import batch

Scored = Callable[..., RewardResult]
VERL, TRL = "volcengine/verl verl", "huggingface/trl docs/source/grpo_trainer.md"
VERIFIERS = "PrimeIntellect-ai/verifiers docs/source/components.md"
LIST = "[float(one == gold) for one, gold in zip(responses, answers)]"


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scored:
    """Scores the responses "4" and "5" to a gold "4" with a file `rewards_of_a_user.py`."""
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules})

    def scored(text: str, name: str = "score", file: str = "rewards_of_a_user.py", **options: object) -> RewardResult:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        config = RewardConfig.model_validate({"name": f"{path}:{name}", "num_workers": 1, **options})
        check_reward(config, max_response_tokens=16)
        with build_reward(config, max_response_tokens=16) as reward:
            return reward.score(*batch([("4", ["4", "5"])]))

    return scored


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("our documents", "def score(response, answer, prompt): return float(response == answer)"),
        ("our documents", f"def score(responses, answers, prompts): return {LIST}"),
        ("our documents", "def score(response, answer, prompt, row): return float(response == row['answer'])"),
        ("any subset", "def score(response, answer): return float(response == answer)"),
        ("any order", "def score(prompt, response, answer): return float(response == answer)"),
        ("any order", "def score(row, answer, response): return float(response == answer == row['answer'])"),
        ("a keyword", "def score(response, **kwargs): return float(response == kwargs['answer'])"),
        ("keyword arguments", f"def score(responses, answers, **kwargs): return {LIST}"),
        ("keyword arguments", "def score(**kwargs): return float(kwargs['response'] == kwargs['answer'])"),
        ("an option", "def score(response, answer, method='x'): return (method == 'x') * (response == answer)"),
        ("by keyword only", "def score(response, *, answer, format_score=0.0): return float(response == answer)"),
        ("an option in between", "def score(response, scale=1.0, answer=None): return scale * (response == answer)"),
        ("async", "async def score(response, answer): return float(response == answer)"),
        ("async of a group", f"async def score(answers, responses): return {LIST}"),
        ("an object", f"class S:\n  def __call__(self, responses, answers, **kw): return {LIST}\nscore = S()"),
        ("a method", "class S:\n  def s(self, answer, response): return float(response == answer)\nscore = S().s"),
        (
            "partial",
            "import functools\ndef f(a, response, answer): return a * (response == answer)\n"
            "score = functools.partial(f, 1.0)",
        ),
        (
            "a decorator",
            "import functools\ndef d(f):\n  @functools.wraps(f)\n  def g(*a, **k): return f(*a, **k)\n"
            "  return g\n@d\ndef score(response, answer): return float(response == answer)",
        ),
    ],
)
def test_called_by_the_names_of_its_parameters(score: Scored, source: str, text: str) -> None:
    assert score(text, batch_size=2).rewards == [1, 0], source


@pytest.mark.parametrize(
    ("source", "signature", "named"),
    [
        (
            f"{VERL}/utils/reward_score/__init__.py",
            "data_source, solution_str, ground_truth, extra_info=None",
            "is response",
        ),
        (
            f"{VERL}/utils/reward_score/gsm8k.py",
            "solution_str, ground_truth, method='strict', format_score=0.0, score=1.0",
            "ground_truth is answer",
        ),
        (
            f"{VERL}/workers/reward_manager/batch.py",
            "data_sources, solution_strs, ground_truths, extra_infos",
            "solution_strs",
        ),
        (f"{TRL}, example 1.1", "completions, **kwargs", "completions is responses"),
        (f"{TRL}, example 3", "completions, ground_truth, **kwargs", "ground_truth is answer"),
        (f"{TRL}, example 4", "prompts, completions, task, **kwargs", "task"),
        (f"{TRL}, its arguments", "prompts, completions, completions_ids, trainer_state, **kwargs", "completions_ids"),
        ("unslothai/unsloth#1579, open-r1", "completions, solution, **kwargs", "solution is answer"),
        ("huggingface/trl#4300", "completions, answer, **kwargs", "completions is responses"),
        ("OpenRLHF/OpenRLHF examples/python/reward_func.py", "queries, prompts, labels, **kwargs", "labels is answers"),
        ("THUDM/slime docs/en/get_started/customization.md", "args, sample", "args"),
        ("the same, a batch", "args, samples", "args"),
        ("hiyouga/EasyR1 examples/reward_function/math.py", "reward_inputs, format_weight=0.1", "reward_inputs"),
        (f"{VERIFIERS}, check_answer", "prompt, response, answer, state", "state"),
        (f"{VERIFIERS}, judge", "prompt, completion, answer, state, **kwargs", "completion is response"),
        (f"{VERIFIERS}, format_reward", "completion, parser, **kwargs", "completion is response"),
        ("rllm-org/rllm rllm/rewards/reward_fn.py", "task_info, action", "task_info"),
        ("a gold with a default", "response, ground_truth=None", "ground_truth is answer"),
        ("names by position only", "response, answer, prompt, /", "response"),
        ("one letter each", "r, a, p", "r, a, p"),
        ("the gold first", "gold, prediction, question", "gold"),
        ("singular and plural", "responses, answer, prompt", "answer"),
        ("no response", "answer, prompt", "answer, prompt"),
        ("nothing", "", "()"),
    ],
)
def test_refused_with_the_names_wanted(score: Scored, source: str, signature: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        score(f"def score({signature}): return 0.0")
    assert named in str(caught.value) and "\n" not in str(caught.value), source
    assert (
        "response" in caught.value.what
        and "answer" in caught.value.what
        and caught.value.where == "config: reward.name"
    )


PICKLES = """
import copy, pickle, typing, multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

@dataclass
class Pair:
    one: str
    gold: "str"

def one(pair):
    return float(pair.one == pair.gold)

def mapped(executor, responses, answers):
    with executor as workers:
        return list(workers.map(one, map(Pair, responses, answers)))

def executor(responses, answers):
    return mapped(ProcessPoolExecutor(2), responses, answers)

def forked(responses, answers):
    return mapped(ProcessPoolExecutor(1, multiprocessing.get_context("fork")), responses, answers)

def every(responses, answers):
    pairs = list(zip(responses, answers))
    found = [executor(responses, answers), forked(responses, answers)]
    found += [[each(*pair) for pair in pairs] for each in (pickled, copied)]
    assert found.count(found[0]) == len(found), found
    return found[0]

def spawned(responses, answers):
    return mapped(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")), responses, answers)

def pickled(response, answer):
    return one(pickle.loads(pickle.dumps(Pair(response, answer))))

def copied(response, answer):
    assert typing.get_type_hints(Pair)["gold"] is str
    return copy.deepcopy(one)(copy.deepcopy(Pair(response, answer)))
"""


OWN = "rewards_of_a_user.py"


@pytest.mark.parametrize(
    ("file", "name"), [*((file, "every") for file in (OWN, "json.py", "two words.py", "v1.2.py")), (OWN, "spawned")]
)
def test_a_file_whose_functions_and_classes_are_pickled(score: Scored, name: str, file: str) -> None:
    """A file named like another module, or like none, is not imported by its name: new interpreters do not know it."""
    result = score(PICKLES, name, file, timeout_s=60.0)
    assert (result.rewards, result.error) == ([1, 0], None)


@pytest.mark.parametrize("line", ["from helper_of_a_user import same", "import helper_of_a_user as h; same = h.same"])
def test_a_file_imports_the_modules_beside_it(score: Scored, tmp_path: Path, line: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "helper_of_a_user.py").write_text("def same(one, other): return float(one == other)")
    text = f"{line}\ndef score(response, answer): return same(response, answer)"
    assert score(text, file="folder/rewards_of_a_user.py").rewards == [1, 0]


def test_files_of_one_name_in_two_folders(score: Scored) -> None:
    assert score("def score(response): return 1.0", file="a/rewards_of_a_user.py").rewards == [1, 1]
    assert score("def score(response): return 2.0", file="b/rewards_of_a_user.py").rewards == [2, 2]


@pytest.mark.parametrize(
    "statement",
    [
        'raise ImportError("libtorch_python.so: failed to map segment from shared object")',
        'raise ImportError("/lib/libx.so.6: cannot allocate memory in static TLS block")',
        "import os, errno; raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))",
        "bytearray(2**33)",
        "import mmap; mmap.mmap(-1, 2**33)",
        """import threading; done = threading.Event()
    for _ in range(400): threading.Thread(target=done.wait, daemon=True).start()""",
    ],
)
def test_a_lack_of_memory_names_the_limit(score: Scored, statement: str) -> None:
    result = score(f"def score(response):\n    {statement}\n    return 1.0")
    assert result.failures == 2 and re.search(r"memory limit .* 2 GiB beyond the imports", result.cause)


def test_a_function_may_have_64_threads_on_any_machine(score: Scored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of many cores is imitated by the number of arenas that glibc would give it."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "512")
    text = """
import threading
def score(response):
    together = threading.Barrier(64, timeout=60)
    def ask():
        bytearray(1000), together.wait()
    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return 1.0
"""
    result = score(text)
    assert result.rewards == [1, 1], result.cause
