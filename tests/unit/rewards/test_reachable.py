r"""Golds that no response can equal: warned of, with the remedy; the golds of benchmarks are not.

`source` is the file or thread that shows the form. Not covered: whether a policy finds the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config import RewardConfig
from oblr_megatron.data.conventions import CONVENTIONS
from oblr_megatron.rewards.reachable import doubts
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from tests.tiny import make_tokenizer
from tests.unit.rewards.conftest import SHARED, batch

VERL = "volcengine/verl examples/data_preprocess"
GSM8K = "There are 2+3=<<2+3=5>>5.\n#### 5"
MATH = r"It is 2. So $x = \boxed{\frac{1}{7}}$."
LIST, BARE = '["\\\\frac{1}{2}"]', "bare answer"


@pytest.fixture(scope="module")
def bytewise() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def warned(golds: Sequence[str], reward: str, tokenizer: PreTrainedTokenizerFast, max_tokens: int = 64) -> list[str]:
    prompts, _ = batch([(gold, []) for gold in golds])
    config = RewardConfig.model_validate({"name": reward})
    return list(doubts([("rows", prompts)], config, tokenizer, max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("source", "reward", "gold", "named"),
    [
        (f"{VERL}/gsm8k.py, answer_raw", "math", GSM8K, '"gsm8k"'),
        ("the same", "math:gsm8k", GSM8K, '"gsm8k"'),
        ("the same", "exact_match", GSM8K, '"gsm8k"'),
        (f"{VERL}/math_dataset.py, solution", "math", MATH, '"math"'),
        ("the same", "math:last_line", MATH, '"math"'),
        ("the same", "exact_match", MATH, '"math"'),
        ("nvidia-china-sae/mair-hub rl-tutorial/vlm-R1/data_processor/process_skywork.py", "math", LIST, BARE),
        ("an answer without content", "math", "$", BARE),
        ("longer than the verifier reads", "math", "1" * 4001, BARE),
        ("longer than a response", "exact_match", "long " * 13, "max_response_tokens"),
        ("longer than a response", "math", "9" * 65, "max_response_tokens"),
    ],
)
def test_warned_of(bytewise: PreTrainedTokenizerFast, source: str, reward: str, gold: str, named: str) -> None:
    [line] = warned(["4", gold, "5", gold], reward, bytewise)
    assert line.startswith("rows: 2 of 4 golds") and "line 2" in line and named in line.partition("Fix: ")[2], source
    assert "\n" not in line and len(line) < 250


def test_what_the_tokenizer_cannot_write(bytewise: PreTrainedTokenizerFast) -> None:
    words = make_tokenizer()
    [line] = warned(["t3", "t3 t4", "Paris"], "exact_match", words)
    assert line.startswith("rows: 1 of 3 golds") and "line 3 is not a text of the tokenizer" in line
    assert "boxed" in warned(["4"], "math", words)[0]
    assert not warned(["t3", "t99"], "exact_match", bytewise)


@pytest.mark.parametrize("reward", ["package.module:function", "http://127.0.0.1:1/score", "environment", "format"])
def test_rewards_that_read_golds_in_their_own_way(bytewise: PreTrainedTokenizerFast, reward: str) -> None:
    assert not warned([GSM8K, MATH, LIST], reward, bytewise)


@pytest.mark.parametrize(
    "gold",
    [
        "4", "-0.5", "1,234", "10\\%", r"\frac{1}{2}", r"(3, \frac{\pi}{2})", "[0,1)", "[1, 2]", r"\text{Evelyn}", "A",
        "x-2y+z-1=0", "52_8", r"\boxed{5}", r"x = \boxed{5}", "#### 5", "5 cm", "1, 2", r"\{1, 2\}", "f(x)=x+1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("reward", EXTRACTIONS)
def test_usual_golds(bytewise: PreTrainedTokenizerFast, reward: str, gold: str) -> None:
    assert not warned([gold], reward, bytewise)


@pytest.mark.parametrize("name", ["gsm8k_train", "math500", "olympiadbench", "dapo_math_17k"])
def test_golds_of_benchmarks(bytewise: PreTrainedTokenizerFast, name: str) -> None:
    path = SHARED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open(encoding="utf-8") as lines:
        golds = [CONVENTIONS["math"].gold(json.loads(line)["answer"]) for line in islice(lines, 500)]
    assert not warned(golds, "math", bytewise, max_tokens=512)
