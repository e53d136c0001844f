r"""Measure the verifier's throughput and latency against math-verify, on answers like GSM8K's and OlympiadBench's.

    python tools/bench/verifier.py --json run/bench/verifier.json    three rounds, some minutes
    python tools/bench/verifier.py --rounds 1 --limit 100            the same in seconds

Every question has eight responses: the set's own solution, then a box with the gold answer in a model's spelling, an
equal expression, a wrong number, another question's gold answer, or no box. Rows:

- math: MathReward with two workers, restarted in every round, 128 questions at a time; "algebra" is the subset of
  responses that need a worker
- math-verify: that library's parse and verify, called as its documentation says, in this process, on the first `BARE`
  responses

Latencies are of single calls in sequence. `times_bare` is the median over rounds of (math-verify's seconds per response
/ row's seconds per response) in one round: more is better.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from golds import DATA, perturbed, respelled
from math_verify import parse, verify
from record import publish
from rounds import paired_ratio

from oblr_megatron.rewards.math import DEADLINE_S, MathReward, settle
from oblr_megatron.rewards.verifier.extract import EXTRACTIONS
from oblr_megatron.types import Prompt, Sample

SETS = {"GSM8K-like": "gsm8k_test", "OlympiadBench-like": "olympiadbench"}
GROUP = 8
BATCH = 1024  # responses: 128 questions
BARE = 1000
WORKERS = 2

Pair = tuple[Prompt, Sample]
_CALCULATOR = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one verifier on one kind of answers.

    Example: Row(answers="GSM8K-like", judge="math", count=10552, right=0.55, on_the_spot=0.99, rounds=3, per_s=9000.0,
                 times_bare=20.0, median_ms=0.02, p90_ms=0.1, p99_ms=0.3, max_ms=9.0)
    """

    answers: str
    judge: str  # the verifier
    count: int
    right: float  # share of accepted responses
    on_the_spot: float  # share of responses that need no worker
    rounds: int
    per_s: float  # responses per second, median over rounds
    times_bare: float
    median_ms: float  # per call, over all rounds
    p90_ms: float
    p99_ms: float
    max_ms: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="directory of the sets, JSONL")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=10_000, help="largest number of questions per set")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for kind, name in SETS.items():
        with (options.data / f"{name}.jsonl").open(encoding="utf-8") as lines:
            entries = [json.loads(line) for line in lines][: options.limit]
        pairs = responses(entries)
        algebra = [pair for pair in pairs if not on_the_spot(pair)]
        rows += measure(kind, pairs, 1 - len(algebra) / len(pairs), options.rounds)
        rows += measure(f"{kind}, algebra", algebra, 0.0, options.rounds)
    publish(rows, "verifier", options.json)


def responses(entries: Sequence[dict[str, str]]) -> list[Pair]:
    """GROUP responses per question, in order."""
    generator = random.Random(0)
    pairs: list[Pair] = []
    for q, entry in enumerate(entries):
        prompt = Prompt(q, f"p{q}", "", (q,), entry["answer"], "bench")
        working = _CALCULATOR.sub("", entry.get("solution") or "").replace("\\boxed", "")
        for _ in range(GROUP):
            box = generator.choices(
                [
                    f"\\boxed{{{entry['answer']}}}",
                    generator.choice(respelled(entry)),
                    generator.choice(perturbed(entry)),
                    f"\\boxed{{{generator.choice(entries)['answer']}}}",
                    f"\\boxed{{{rewritten(entry['answer'])}}}",
                    entry["answer"],
                ],
                weights=[3, 2, 1, 1, 1, 1],
            )[0]
            pairs.append((prompt, Sample(q, (q,), (1,), (0.0,), f"{working}\n\nThe answer is {box}.", "stop", 0)))
    return pairs


def rewritten(answer: str) -> str:
    """An expression that is equal by computer algebra; numbers stay as they are."""
    return answer if re.fullmatch(r"-?[0-9.]+", answer) else f"\\frac{{2({answer})}}{{2}}"


def on_the_spot(pair: Pair) -> bool:
    """Whether the response needs no worker."""
    answer = EXTRACTIONS["math"](pair[1].text)
    return answer is None or settle(answer, pair[0].answer) is not None


def measure(kind: str, pairs: Sequence[Pair], spot: float, rounds: int) -> list[Row]:
    """Measure both verifiers on the same responses, in turn."""
    few = pairs[:BARE]
    seconds: dict[str, list[float]] = {"math": [], "math-verify": []}
    latencies: dict[str, list[float]] = {"math": [], "math-verify": []}
    right: dict[str, float] = {}
    for _ in range(rounds):
        with new_reward() as reward:
            taken, right["math"] = timed_batches(reward, pairs)
        seconds["math"].append(taken / len(pairs))
        with new_reward() as reward:
            latencies["math"] += [timed_call(reward, pair) for pair in pairs]
        calls = [timed_bare(pair) for pair in few]
        right["math-verify"] = statistics.fmean(accepted for _, accepted in calls)
        seconds["math-verify"].append(statistics.fmean(taken for taken, _ in calls))
        latencies["math-verify"] += [taken for taken, _ in calls]
    return [
        Row(
            answers=kind,
            judge=verifier,
            count=len(pairs) if verifier == "math" else len(few),
            right=right[verifier],
            on_the_spot=spot if verifier == "math" else 1.0,
            rounds=rounds,
            per_s=1 / statistics.median(taken),
            times_bare=paired_ratio(seconds["math-verify"], taken),
            **quantiles(latencies[verifier]),
        )
        for verifier, taken in seconds.items()
    ]


def new_reward() -> MathReward:
    """A MathReward with warm workers."""
    reward = MathReward(EXTRACTIONS["math"], num_workers=WORKERS, deadline_s=DEADLINE_S)
    reward.pool.map([(r"\sqrt{8}", r"2\sqrt{2}")] * WORKERS)
    return reward


def timed_batches(reward: MathReward, pairs: Sequence[Pair]) -> tuple[float, float]:
    """(seconds for all batches, share of accepted responses)."""
    start, right = time.perf_counter(), 0.0
    for first in range(0, len(pairs), BATCH):
        prompts, samples = zip(*pairs[first : first + BATCH], strict=True)
        right += sum(reward.score(prompts, samples).rewards)
    return time.perf_counter() - start, right / len(pairs)


def timed_call(reward: MathReward, pair: Pair) -> float:
    """Seconds for one response."""
    start = time.perf_counter()
    reward.score(pair[:1], pair[1:])
    return time.perf_counter() - start


def timed_bare(pair: Pair) -> tuple[float, bool]:
    """(seconds, whether math-verify accepts) for one response."""
    start = time.perf_counter()
    accepted = bool(verify(parse(f"\\boxed{{{pair[0].answer}}}"), parse(pair[1].text)))
    return time.perf_counter() - start, accepted


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Quantiles in milliseconds."""
    ordered = sorted(taken * 1000 for taken in seconds)
    at = {"median_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
    return {name: ordered[int(q * (len(ordered) - 1))] for name, q in at.items()} | {"max_ms": ordered[-1]}


if __name__ == "__main__":
    main()
