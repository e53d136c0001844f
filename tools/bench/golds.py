r"""Check the verifier on all gold answers of the benchmarks: against themselves, other spellings, and near misses.

    python tools/bench/golds.py --json run/bench/golds.json     27,000 gold answers, one minute

Prints every exception. docs/verifier.md explains them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import publish

from oblr_megatron.rewards.math import DEADLINE_S, MathReward
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.types import Prompt, Sample

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"  # a sibling of the repository
SETS = ("gsm8k_train", "gsm8k_test", "math500", "olympiadbench", "dapo_math_17k")

Entry = dict[str, Any]  # a line of a set: "answer" and further keys
_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, slots=True)
class Row:
    """Results for one kind of text on one set.

    Example: Row(set="math500", texts="perturbed", expected="unequal", count=3451, exceptions=2, rate=0.9994)
    """

    set: str
    texts: str
    expected: str
    count: int
    exceptions: int
    rate: float  # share of right decisions


def main(arguments: Sequence[str] | None = None) -> None:
    """Score, print the table and the exceptions, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="directory of the sets, JSONL")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in SETS:
        with (options.data / f"{name}.jsonl").open(encoding="utf-8") as lines:
            entries = [json.loads(line) for line in lines]
        for texts, (extraction, write, equal) in KINDS.items():
            cases = [(entry["answer"], text) for entry in entries for text in write(entry)]
            if not cases:
                continue
            wrong = exceptions(cases, extraction, equal=equal)
            rate = 1 - len(wrong) / len(cases)
            rows.append(Row(name, texts, "equal" if equal else "unequal", len(cases), len(wrong), rate))
            for gold, text in wrong:
                print(f"{name}, {texts}: {text!r} is {'not ' if equal else ''}accepted as {gold!r}")
    publish(rows, "gold answers", options.json)


def exceptions(cases: Sequence[tuple[str, str]], extraction: str, *, equal: bool) -> list[tuple[str, str]]:
    """The (gold, response) pairs that the verifier decides wrongly."""
    prompts = [Prompt(q, f"p{q}", "", (q,), gold, "golds") for q, (gold, _) in enumerate(cases)]
    samples = [Sample(q, (q,), (1,), (0.0,), text, "stop", 0) for q, (_, text) in enumerate(cases)]
    with MathReward(EXTRACTIONS[extraction], num_workers=2, deadline_s=DEADLINE_S) as reward:
        result = reward.score(prompts, samples)
    return [case for case, value in zip(cases, result.rewards, strict=True) if (value == 1.0) is not equal]


def itself(entry: Entry) -> list[str]:
    """The gold answer in a box."""
    return [f"so \\boxed{{{entry['answer']}}}."]


def respelled(entry: Entry) -> list[str]:
    r"""Spellings that models use: \dfrac, \left, braces or none, a full stop, spaces at signs, other numerals."""
    answer = entry["answer"]
    spelled = re.sub(r"\\frac(?![a-z])", r"\\dfrac", answer)
    spelled = spelled if "left" in spelled else re.sub(r"(?<!\\)([(\[])", r"\\left\1", spelled)
    spelled = spelled if "right" in spelled else re.sub(r"(?<!\\)([)\]])", r"\\right\1", spelled)
    texts = [
        spelled,
        f"{{{answer}}}",
        f"\\displaystyle {answer.rstrip('.')}.",
        re.sub(r"(?<=[0-9}]) ?([-+]) ?(?=[0-9\\])", r" \1 ", answer),
        f"$ {answer} $",
        answer.replace("-", "\u2212"),
        f"\\color{{red}}{{{answer}}}",
        re.sub(r"(?<=[\^_}a-z])\{([0-9A-Za-z])\}", r" \1", answer),  # \frac 1 2, x^ 2, \text A
    ]
    if _NUMBER.fullmatch(answer):
        value = int(answer)
        texts += [f"{value:,}", f"{value}.0", f"\\frac{{{2 * value}}}{{2}}", f"x = {value}", f"{value}\\text{{ km}}^2"]
    return _boxes(texts)


def raw(entry: Entry) -> list[str]:
    """The benchmark's own spelling, with its unit if it has one."""
    answer = entry.get("answer_raw") or ""
    unit = entry.get("unit")
    return _boxes([answer, *([f"{answer} \\text{{{unit}}}"] if unit and "$" not in unit else [])] if answer else [])


def solution(entry: Entry) -> list[str]:
    """The benchmark's own solution, if it boxes its answer."""
    text = entry.get("solution") or ""
    return [text] if "\\boxed{" in text else []


def after_hashes(entry: Entry) -> list[str]:
    """GSM8K's form: the answer after ####."""
    return [f"{entry.get('solution', '')}\n#### {entry.get('answer_raw') or entry['answer']}"]


def on_the_last_line(entry: Entry) -> list[str]:
    """DAPO's form ("Answer: ...") and a final sentence."""
    return [f"So it is.\nAnswer: ${entry['answer']}$", f"So it is.\nThe final answer is {entry['answer'].rstrip('.')}."]


def perturbed(entry: Entry) -> list[str]:
    """Near misses: a digit off by one, an extra entry, the value plus one, the opposite sign, another word."""
    answer = entry["answer"]
    texts = [f"{answer}, 987654321", f"{answer} \\text{{ or }} 987654321", f"({answer})+1"]
    for digits in re.finditer(r"[0-9](?![0-9])", answer):
        texts.append(answer[: digits.start()] + str((int(digits.group()) + 1) % 10) + answer[digits.end() :])
    if _NUMBER.fullmatch(answer) and int(answer):
        value = int(answer)
        texts += [str(-value), str(value + 1), f"{value}.0000001", f"{value * 10}", f"\\frac{{1}}{{{value + 1}}}"]
    if re.fullmatch(r"\\text\{\(?[A-Za-z]+\)?\}", answer):
        texts += [r"\text{not }" + answer, r"\text{(Z)}"]
    return _boxes(texts)


def _boxes(texts: Iterable[str]) -> list[str]:
    return [f"\\boxed{{{text}}}" for text in dict.fromkeys(texts)]


KINDS: dict[str, tuple[str, Callable[[Entry], list[str]], bool]] = {
    "itself": ("math", itself, True),
    "respelled": ("math", respelled, True),
    "answer_raw": ("math", raw, True),
    "solution": ("math", solution, True),
    "####": ("math:gsm8k", after_hashes, True),
    "last line": ("math:last_line", on_the_last_line, True),
    "perturbed": ("math", perturbed, False),
}

if __name__ == "__main__":
    main()
