"""The shapes of step that `step.py` and `real_model.py` measure.

demo    64 x 8 responses of about 4 tokens; a model of 2 layers and hidden size 96, warm-started on two-digit sums
long    32 x 8 responses of about 120 tokens, at most 256; random weights in 6 layers of hidden size 256
real    16 x 4 responses of about 100 tokens to prompts of about 50; a language model (real_model.py)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.tiny import VOCAB, make_hf_dir  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = {"demo": (64, 8, 10), "long": (32, 8, 1), "real": (16, 4, 1)}
"""Prompts of a step, responses of a prompt, and steps of a round."""

STORY = (
    "Here is a story for children about a {} and a {}. It is told slowly, with many details, and it does not end soon. "
    "Both live in a small village by the sea, where little happens in winter and everybody knows everybody. It begins:"
)
THINGS = ("fox", "clock", "sailor", "lantern", "tailor", "bear", "violin", "baker", "ghost", "train", "crow", "kite")

END_EVERY = 150.0
"""Tokens after which a response of shape "long" ends, on average, if it is not cut."""


def make_inputs(shape: str, directory: Path, *, quick: bool) -> None:
    """Write model and rows of a shape to a directory."""
    if shape == "demo":
        steps = "150" if quick else "900"
        command = [sys.executable, "examples/tiny_cpu/prepare.py", "--out", str(directory), "--steps", steps]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return
    if shape == "real":
        lines = [json.dumps({"question": STORY.format(*pair), "answer": "none"}) for pair in permutations(THINGS, 2)]
        (directory / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return
    path = make_hf_dir(
        directory / "model",
        max_position_embeddings=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        head_dim=64,
    )
    model = Qwen3ForCausalLM.from_pretrained(path)
    end_rarely(model)
    model.save_pretrained(path)
    rows = [{"question": f"t{2 + n % 30} t{2 + n // 30 % 30} t{3 + n % 7}", "answer": "t5"} for n in range(900)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text(text, encoding="utf-8")


def end_rarely(model: PreTrainedModel) -> None:
    """Scale the output layer until the end has a chance of 1 in END_EVERY after random tokens: its own logit is 0."""
    head, end = model.get_output_embeddings().weight, model.config.eos_token_id
    tokens = torch.randint(2, VOCAB, (16, 64), generator=torch.Generator().manual_seed(0))
    low, high = 0.0, 100.0
    with torch.no_grad():
        head[end] = 0
        logits = model(tokens).logits
        for _ in range(50):
            scale = (low + high) / 2
            chance = torch.softmax(scale * logits, -1)[..., end].mean()
            low, high = (scale, high) if chance > 1 / END_EVERY else (low, scale)
        head *= low


def table_of(shape: str) -> dict[str, Any]:
    """The config of a shape, without the paths of model and data."""
    table: dict[str, Any] = tomllib.loads((ROOT / "examples/tiny_cpu/config.toml").read_text(encoding="utf-8"))
    if shape == "long":
        table["rollout"] |= {"max_response_tokens": 256, "max_num_seqs": 256, "kv_cache_gib": 1.0}
        table["reward"] = {"name": "step_shapes:even_words"}
        table["model"].pop("make_vocab_size_divisible_by")
        table["data"] |= {"template": "{question}", "max_prompt_tokens": 8}
    if shape == "real":
        table["rollout"] |= {"max_response_tokens": 100, "max_num_seqs": 64, "kv_cache_gib": 0.5}
        table["reward"] = {"name": "step_shapes:short_words"}
        table["model"].pop("make_vocab_size_divisible_by")
        table["data"] |= {"template": "{question}", "max_prompt_tokens": 256}
    return table


def short_words(response: str, answer: str, prompt: str) -> float:
    """The reward of shape "real": the share of words of at most four letters."""
    words = response.split()
    return sum(len(word) <= 4 for word in words) / max(1, len(words))


def even_words(response: str, answer: str, prompt: str) -> float:
    """The reward of shape "long": the share of even words in "t7t12t5"; it varies within every group."""
    words = response.split("t")[1:]
    return sum(int(word) % 2 == 0 for word in words) / max(1, len(words))


REWARDS = {"long": even_words, "real": short_words}
