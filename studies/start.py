"""Make the model and data that a study's runs start from: a tiny Qwen3 warm-started on answers of mixed quality.

A start is a directory that every backend can read:

    model/            Hugging Face directory with a character-level tokenizer
    train.jsonl       one {"question": ..., "answer": ...} per line
    heldout.jsonl
    start.json        the settings it was made from; a start with the same settings is reused
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from oblr_megatron.errors import UserError
from oblr_megatron.metrics import write_whole
from studies.imitate import answered, imitate, padded
from studies.policy import END, FIRST_CHARACTER, PAD, UNKNOWN, ToyPolicy
from studies.tasks import TASKS, Row, Skill, Task

HIDDEN, LAYERS = 64, 2
BATCH, STEPS, LR = 64, 1500, 3e-3
SHARE_LEARNING = 0.6  # share of the steps in which the teacher is always right
WEIGHT_SEED = 0


def task_named(name: str) -> Task:
    """The task of this name.

    Raises:
        UserError: no task has this name.
    """
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}", where="task", fix=f"name one of {', '.join(TASKS)}")
    return TASKS[name]


def plain_task(name: str, backend: str) -> Task:
    """The task of this name, for a backend that knows the rewards' own values only.

    Raises:
        UserError: no task has this name, or only the toy trainer has its rewards.
    """
    task = task_named(name)
    if (task.scale, task.shift) != (1.0, 0.0):
        what = f"task {name} has shifted rewards, which {backend} does not know"
        raise UserError(what, where="task", fix='use another task, or backend = "toy" in a study')
    return task


def prepare(task_name: str, skill: Skill, directory: Path, *, steps: int = STEPS, seed: int = WEIGHT_SEED) -> Path:
    """Return DIRECTORY/TASK-SKILL; make it unless it is complete with these settings (about 20 s on one core).

    Raises:
        UserError: no task has this name.
    """
    task = task_named(task_name)
    made_from = {"task": task.name, "skill": skill, "hidden": HIDDEN, "layers": LAYERS, "steps": steps}
    if seed != WEIGHT_SEED:
        made_from["seed"] = seed
    target = directory / f"{task.name}-{skill}"
    stamp = target / "start.json"
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == made_from:
        if not (target / "train.jsonl").exists():  # a repository holds the model alone
            _write_rows(task, target)
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    train = _write_rows(task, target)
    model = build_model(task, seed)
    warm_start(model, task, train, skill, steps, seed)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(target / "model")
    character_tokenizer(task.characters, task.max_positions).save_pretrained(target / "model")
    write_whole(stamp, json.dumps(made_from) + "\n")
    return target


def _write_rows(task: Task, target: Path) -> list[Row]:
    """Write both sets of questions; returns those of the training."""
    train, held_out = task.rows()
    for name, rows in (("train", train), ("heldout", held_out)):
        lines = (json.dumps(asdict(row)) + "\n" for row in rows)
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return train


def load(start: Path, task: Task, *, temperature: float = 1.0) -> ToyPolicy:
    """Load the policy that a run starts from.

    Raises:
        UserError: the directory holds no start.
    """
    if not (start / "start.json").exists():
        raise UserError("start.json is missing", where=str(start), fix="make a start with `oblr-megatron study task`")
    transformers_logging.disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(start / "model", dtype=torch.float32)
    return ToyPolicy(model, task.characters, temperature=temperature)


def build_model(task: Task, seed: int = WEIGHT_SEED) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 in fp32: grouped-query attention, tied embeddings as in the small Qwen3 models."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=FIRST_CHARACTER + len(task.characters),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=task.max_positions,
        initializer_range=0.1,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,  # with an id, transformers keeps that embedding at 0, where the gradient of RMSNorm is huge
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    return model


def warm_start(
    model: Qwen3ForCausalLM, task: Task, rows: Sequence[Row], skill: Skill, steps: int, seed: int = WEIGHT_SEED
) -> None:
    """Train on right answers, then on the teacher's mixed ones, so that RL starts from a policy that errs."""
    generator, policy = random.Random(seed), ToyPolicy(model, task.characters)

    def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        share_right = 1.0 if step < SHARE_LEARNING * steps else task.skills[skill]
        drawn = generator.choices(rows, k=BATCH)
        answers = [task.teach(row, generator, share_right) for row in drawn]
        pairs = zip(drawn, answers, strict=True)
        return padded([answered(policy.encode(row.question), (*policy.encode(a), END)) for row, a in pairs], PAD)

    imitate(model, batch_of, steps=steps, lr=LR)


def character_tokenizer(characters: str, max_positions: int = 64) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character. It adds no token at the start or the end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = {"<pad>": PAD, "<eos>": END, "<unk>": UNKNOWN}
    vocabulary = names | {character: FIRST_CHARACTER + index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # otherwise decoding puts a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
