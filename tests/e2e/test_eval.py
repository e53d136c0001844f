"""`oblr-megatron eval` with real vLLM: two sets in one call. Oracle: transformers.

Not covered: GPUs, hub data sets, a full disk.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.forked import forked_cli

PROMPTS, K, TOKENS = 48, 4, 6
SETTINGS = {
    "reward.name": "math:last_line",
    "reward.num_workers": 1,
    "data.max_prompt_tokens": 16,
    "rollout.max_response_tokens": TOKENS,
    "evaluate.temperature": 0.4,  # low, so that samples of the untrained model are sometimes right
    "rollout.num_threads": 1,
    "rollout.kv_cache_gib": 0.1,
    "num_prompts": 4,  # blocks of 16 responses
    "group_size": 4,
}


@dataclass(frozen=True)
class Evaluated:
    """Inputs and results of the first call of the command."""

    root: Path
    model: Path
    output: str

    def arguments(self, out: Path, *more: str) -> list[str]:
        sets = [f"first={self.root / 'a.jsonl'}", f"second={self.root / 'b.jsonl'}"]
        keys = [f"{key}={value}" for key, value in SETTINGS.items()]
        return ["eval", "--model", str(self.model), "--k", str(K), "--out", str(out), "--data", *sets, *keys, *more]

    def items(self, name: str) -> list[dict[str, Any]]:
        lines = (self.root / "whole" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def evaluated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """The first call. Half of the gold answers are the model's own greedy responses, so that some are right."""
    root = tmp_path_factory.mktemp("eval")
    rows = [json.loads(line) for line in (tiny / "heldout.jsonl").read_text().splitlines()[: 2 * PROMPTS]]
    for row, text in zip(rows[::2], greedy(tiny / "model", [row["question"] for row in rows[::2]]), strict=True):
        row["answer"] = text
    for name, part in (("a", rows[:PROMPTS]), ("b", rows[PROMPTS:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    made = Evaluated(root, tiny / "model", "")
    done = forked_cli(made.arguments(root / "whole", "--json", str(root / "copy.json")))
    assert done.returncode == 0, done.stderr
    return Evaluated(root, tiny / "model", done.stdout)


def greedy(path: Path, questions: list[str]) -> list[str]:
    """Greedy responses by transformers, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    texts = []
    for question in questions:
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS)
        texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("name", ["first", "second"])
def test_metrics_agree_with_the_files_and_with_transformers(evaluated: Evaluated, name: str) -> None:
    items = evaluated.items(name)
    greedy_ones, sampled = items[:PROMPTS], items[PROMPTS:]
    assert [item["kind"] for item in items] == ["greedy"] * PROMPTS + ["sampled"] * K * PROMPTS
    assert [item["row"] for item in sampled] == [row for row in range(PROMPTS) for _ in range(K)]
    texts = greedy(evaluated.model, [item["prompt"] for item in greedy_ones])
    assert [item["response"] for item in greedy_ones] == texts
    assert len({item["response"] for item in sampled}) > 8, "samples differ"
    for item in items:
        assert item["set"] == name and item["tokens"] <= TOKENS and item["verdict"] == item["reward"]
        assert item["answer"] == item["response"] or not item["verdict"]
        assert item["verdict"] == (item["response"].lstrip("0") == item["gold"].lstrip("0")), item

    found = json.loads((evaluated.root / "whole" / "figures.json").read_text())["sets"][name]
    groups = [sampled[first : first + K] for first in range(0, len(sampled), K)]
    assert found["accuracy"]["value"] == fmean(item["verdict"] for item in greedy_ones) >= 0.5
    assert found[f"mean@{K}"]["value"] == pytest.approx(fmean(item["verdict"] for item in sampled))
    assert found[f"pass@{K}"]["value"] == fmean(any(item["verdict"] for item in group) for group in groups) > 0
    assert found["pass@1"]["value"] <= found["pass@2"]["value"] <= found[f"pass@{K}"]["value"]
    assert 0 < found[f"maj@{K}"]["value"] < 1
    assert found["response_length"] == fmean(item["tokens"] for item in items)


def test_output(evaluated: Evaluated) -> None:
    lines = evaluated.output.splitlines()
    for line, name in zip(lines[:2], ("first", "second"), strict=True):
        percent = r"\d+\.\d%"
        metrics = f"mean@4 {percent}, pass@4 {percent}, maj@4 {percent}"
        pattern = rf"{name}: accuracy {percent} \({percent} to {percent}\) greedy, {metrics} on 48 prompts"
        assert re.fullmatch(pattern, line)
    assert re.search(r"set +prompts +accuracy +mean@4 +pass@4 +maj@4 +truncated +tokens", evaluated.output)
    copy = json.loads((evaluated.root / "copy.json").read_text())
    assert copy == json.loads((evaluated.root / "whole" / "figures.json").read_text())


def test_an_evaluation_does_not_write_into_another(evaluated: Evaluated) -> None:
    done = forked_cli(evaluated.arguments(evaluated.root / "whole"))
    assert done.returncode == 2 and "holds something" in done.stderr
