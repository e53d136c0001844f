"""Conventions: how each known benchmark stores its rows. Nothing is read or downloaded here.

    CONVENTIONS["gsm8k"].gold("... #### 1,234")      # "1234"

A convention names the data set on the Hugging Face hub, the question and answer columns, how to read the gold answer
from its column, and the tolerance. Gold readers do not change an answer that is already bare, so a cleaned copy of a
set loads with the convention of the original.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from oblr_megatron.rewards.verifier.extract import boxed

Reader = Callable[[Any], Any]

MOST_WHOLE = 2**53  # above it, floats no longer hold every whole number
_INTEGER = re.compile(r"([+-]?)(\d+)(?:\.0*)?")
_OPEN_BOX = re.compile(r"\\boxed(?![A-Za-z]|\s*\{)([^$]+?)(?:\$|\\[)\]\\]|\\end\b)")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:"'


def text(value: Any) -> str:
    """A value as text: strings unchanged, finite numbers written out, anything else empty.

    Whole numbers have no point, because a table writes them as floats if one value is missing.

    Examples: " 5" -> " 5"; 5 -> "5"; 5.0 -> "5"; Decimal("5.50") -> "5.50"; nan -> ""; True -> ""; ["5"] -> "".
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (float, Decimal)):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if -MOST_WHOLE <= value <= MOST_WHOLE and value == int(value) else str(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def as_written(value: Any) -> Any:
    """The column, unchanged."""
    return value


def after_hashes(value: Any) -> str:
    """GSM8K: what follows the last ####, without thousands commas. "... #### 1,234" -> "1234"."""
    return text(value).rsplit("####", maxsplit=1)[-1].strip().lstrip("$").replace(",", "")


def last_box(value: Any) -> str:
    r"""MATH: the last box of a solution; an answer without one as it is. r"so \boxed{p - q}." -> "p - q".

    Some solutions have \fbox{7} instead, or \boxed 7, which ends with the formula.
    """
    whole = text(value)
    box = boxed(whole) or boxed(whole.replace("\\fbox", "\\boxed"))
    if box is None and (open_boxes := _OPEN_BOX.findall(whole)):
        box = open_boxes[-1]
    return (whole if box is None else box).strip()


def integer(value: Any) -> str:
    """AIME and AMC: whole numbers without leading zeros or a fraction. "033" -> "33"; 27.0 -> "27"; "3/2" -> "3/2"."""
    answer = text(value).strip()
    match = _INTEGER.fullmatch(answer)
    return answer if match is None else match[1].removeprefix("+") + (match[2].lstrip("0") or "0")


def joined(value: Any) -> str:
    r"""OlympiadBench: the answers of a list, without $ signs. ["$69$,$84$"] -> "69,84"; ["$1$", "$2$"] -> "1, 2"."""
    answers = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(_DOLLAR.sub("", text(answer)).strip() for answer in answers)


def without_instruction(value: Any) -> Any:
    """DAPO: the problem without the instruction around it; any other value unchanged."""
    message = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else None
    content = message.get("content") if isinstance(message, dict) and message.get("role") == "user" else value
    words = content.strip().removesuffix(".") if isinstance(content, str) else ""
    if not (words.startswith(_DAPO_BEFORE) and words.endswith(_DAPO_AFTER)):
        return value
    return words.removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER).strip()


@dataclass(frozen=True, slots=True)
class Convention:
    """Storage format of one benchmark's rows.

    Example: CONVENTIONS["aime24"] == Convention(hub="HuggingFaceH4/aime_2024", ...)
    """

    title: str
    hub: str = ""  # data set on the hub that the bare name stands for; empty if there is none
    subset: str = ""
    split: str = ""  # for evaluation
    training_split: str = ""  # for training; empty: the same as `split`
    questions: tuple[str, ...] = ("question", "problem")  # columns; the first one that the row has is read
    answers: tuple[str, ...] = ("answer",)  # likewise
    solutions: tuple[str, ...] = ()  # those of `answers` that are skipped if they have no box
    question: Reader = as_written
    gold: Reader = text
    tolerance: str = ""  # for every row, in the format of types.Prompt.tolerance
    tolerances: tuple[str, ...] = ()  # columns that may hold a tolerance for the row


_MATH = Convention(
    "MATH",
    hub="DigitalLearningGmbH/MATH-lighteval",
    split="test",
    training_split="train",
    questions=("problem", "question"),
    answers=("answer", "solution"),  # the answer has its own column or stands in the solution's box
    solutions=("solution",),
    gold=last_box,
)
_CONTEST = Convention(
    "AIME, any year",
    questions=("problem", "question", "Problem", "Question"),
    answers=("answer", "Answer"),
    gold=integer,
)

CONVENTIONS: dict[str, Convention] = {
    "gsm8k": Convention(
        "GSM8K",
        hub="openai/gsm8k",
        subset="main",
        split="test",
        training_split="train",
        gold=after_hashes,
    ),
    "math": _MATH,
    "math500": replace(_MATH, title="MATH-500", hub="HuggingFaceH4/MATH-500", training_split=""),
    "aime": _CONTEST,
    "aime24": replace(_CONTEST, title="AIME 2024", hub="HuggingFaceH4/aime_2024", split="train"),
    "aime25": replace(_CONTEST, title="AIME 2025", hub="math-ai/aime25", split="test"),
    "amc": replace(_CONTEST, title="AMC, any year"),
    "amc23": replace(_CONTEST, title="AMC 2023", hub="math-ai/amc23", split="test"),
    "olympiadbench": Convention(
        "OlympiadBench, text, English",
        hub="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        split="train",
        answers=("final_answer", "answer"),
        gold=joined,
        tolerances=("error", "tolerance"),
    ),
    "minerva": Convention(
        "Minerva's OCWCourses",
        hub="math-ai/minervamath",
        split="test",
        answers=("answer_latex", "answer"),
        tolerance="1%",
    ),
    "dapo": Convention(
        "DAPO-Math-17k",
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        split="train",
        questions=("prompt", "question"),
        answers=("reward_model.ground_truth", "answer", "solution"),
        question=without_instruction,
        gold=integer,
    ),
}

PLAIN = Convention("plain columns", questions=(), answers=())

GENERATED = Convention("tasks of reasoning-gym", questions=("question",), answers=("answer",))
