"""`oblr-megatron init MODEL_DIR DATA_FILE [--out CONFIG.toml]`: writes a first config. Imports no torch at load.

The values come from the model's config.json, its tokenizer, the rows, and the memory of this machine. A run's own
checks must pass before the file is written, except those of the room on the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import tomllib
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config.data import DataConfig, SourceConfig
    from oblr_megatron.preflight.device_memory import RankDevice
    from oblr_megatron.preflight.fitting import Fit

QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input")
ANSWERS: tuple[str, ...] = ("answer", "solution", "ground_truth", "gold", "target", "output", "response", "label")
ANSWERS += ("reward_model.ground_truth", "extra_info.answer")  # verl's
"""Columns that are looked for, in this order."""
BOX = "\\boxed{}"
ASKED = "Please reason step by step, and put your final answer within \\boxed{}."
TASK = f"{{question}}\n{ASKED}"
GYM_TASK = "{question}\nThink step by step, and put the final answer between <answer> and </answer>."
MATHEMATICAL = re.compile(r"[-+]?[\d.,]+%?|[-+]?\d+\s*/\s*\d+|.*[\\^$].*", re.DOTALL)
MOST = 0.8  # share of mathematical answers that makes "math" the reward
SEEN_ROWS = 100  # by which columns and convention are chosen
READ_ROWS = 10_000  # by which the reward and the form of a prompt are chosen
KEPT = 0.99  # share of rows that data.max_prompt_tokens keeps
RESPONSE_TOKENS = 512
THOUGHT_TOKENS = 4096  # of a model that always thinks; its template opens the thought
THINKING = "enable_thinking"  # Qwen3's switch; by default its models think
NO_THOUGHTS = "Without thoughts, which take thousands of tokens. For true, raise rollout.max_response_tokens."
TALK = "The rows are conversations, rendered by the model's chat template."
PLAIN = "Plain text: the model's stop tokens do not end a turn of its chat template, as of a base model."
ENDLESS = "The model's stop tokens do not end its turns. Name one that does in its generation_config.json."
FORMS = {  # what rows ask for -> the reward that reads it, and what it reads
    "\\boxed": ("math", r"the last \boxed{...}"),
    "####": ("math:gsm8k", "the text after ####"),
    "form answer:": ("math:last_line", 'the text after "Answer:" in the last line'),  # as DAPO and simple-evals
}
LEAST_FOLDS = 8  # so that up to 8 replicas can share them
FOLDS = "Parts of a step, from which its noise is measured. A multiple of the model's replicas."
RATES = ((50_000_000, 5e-4), (400_000_000, 3e-5), (math.inf, 1e-6))
"""(parameters, learning rate of models below): of the demo, of SmolLM2-135M (examples), and the usual rate."""

Sections = dict[str, dict[str, tuple[str | int | float, str]]]
"""Value and comment of the keys of each section. Example: {"": {"num_steps": (100, "Optimizer steps.")}}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="model directory in Hugging Face format")
    parser.add_argument("data", metavar="DATA_FILE", help="training rows: JSON Lines, parquet, or as in docs/data.md")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("config.toml"),
        metavar="CONFIG.toml",
        help="file to write; must not exist (default: %(default)s)",
    )
    parser.add_argument("--question-column", metavar="NAME", help=f"default: the first of {', '.join(QUESTIONS)}")
    parser.add_argument("--answer-column", metavar="NAME", help=f"default: the first of {', '.join(ANSWERS)}")
    parser.set_defaults(function=init)


def init(options: argparse.Namespace) -> int:
    """Write the config and print the next commands.

    Raises:
        UserError: a run would refuse the config, or the file cannot be written; nothing was written.
    """
    from oblr_megatron.checkpoint.hf_dir import check_hf_dir
    from oblr_megatron.config import parse_config

    out: Path = options.out
    if out.exists() or not out.absolute().parent.is_dir():
        raise _cannot_write(out, "the file exists" if out.exists() else "its directory does not exist")
    if out.suffix != ".toml":  # `train` reads x.json as JSON
        raise _cannot_write(out, "it is TOML, and the name does not end in .toml")
    model = check_hf_dir(options.model)
    data = _data(options.data, options.question_column, options.answer_column)

    from oblr_megatron.model.precision import usable_gpus

    gpus = usable_gpus()
    ranks = max(1, gpus)
    sections = settings(model, data, out, on_gpu=gpus > 0, ranks=ranks)
    config = parse_config(tomllib.loads(document(sections)), str(out))

    from oblr_megatron.checks.run_dir import check_run_dir
    from oblr_megatron.preflight.dry_run_command import device_of
    from oblr_megatron.preflight.fitting import fitting
    from oblr_megatron.preflight.inputs import preflight

    try:
        check_run_dir(config.run_dir)
    except UserError as error:
        held = os.path.lexists(config.run_dir)
        fix = "give another --out" if held else "call it in a directory that you can write to"
        raise UserError(f"{error.what}: {config.run_dir}", where=str(out), fix=fix) from error
    preflight(config, 1, owns_run_dir=False, engines=False)
    device = device_of(config, 1, None)
    fit = fitting(config, model.config, device)
    if fit is not None:
        fit_sections(sections, fit, device)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(document(sections))
    except OSError as error:
        raise _cannot_write(out, error.strerror or "") from error
    print(f"wrote {out}; its comments say what to change")
    if fit is None:
        print("no choice fits into the memory here: give the dry run --gpu-memory-gb for other machines")
    train = f"oblr-megatron train {shlex.quote(str(out))}"
    several = f" --nproc-per-node {ranks}" if ranks > 1 else ""
    print(f"next: {train} --dry-run{several}    # does it fit?")
    print(f"      {train}{several}")
    return EXIT_OK


def fit_sections(sections: Sections, fit: Fit, device: RankDevice) -> None:
    """Write what fits into the sections of `settings`."""
    parallel, rollout = fit.config.parallel, sections["rollout"]
    where = "its GPU has" if device.on_gpu else "free here were"
    free = "" if device.num_bytes is None else f", {where} {device.num_bytes / 1e9:.1f} GB"
    needs = f"Padded tokens of a microbatch. A rank and its engine need {fit.num_bytes / 1e9:.1f} GB{free}."
    sections["parallel"] = {"micro_batch_tokens": (parallel.micro_batch_tokens, needs)}
    if parallel.recompute_granularity != "none":
        why = 'Layers run again in backward, to save memory; "none" is faster.'
        sections["parallel"]["recompute_granularity"] = (parallel.recompute_granularity, why)
    if fit.config.optimizer.offload != "none":
        why = "Masters and moments are in host memory while engines sample, or they would not fit."
        sections["optimizer"]["offload"] = (fit.config.optimizer.offload, why)
    if fit.config.rollout.kv_cache_gib != type(fit.config.rollout).model_fields["kv_cache_gib"].default:
        why = "GiB of an engine's KV cache. Sequences that fit are decoded together."
        rollout["kv_cache_gib"] = (fit.config.rollout.kv_cache_gib, why)
    response, comment = rollout["max_response_tokens"]
    if fit.config.rollout.max_response_tokens != response:
        rollout["max_response_tokens"] = (fit.config.rollout.max_response_tokens, f"{comment} {response} do not fit.")


def _cannot_write(out: Path, reason: str) -> UserError:
    return UserError(f"cannot write the config: {reason}", where=str(out), fix="give another --out")


def _data(path: str, question: str | None, answer: str | None) -> DataConfig:
    """The section of a source, with columns that its first row has, and the convention by which its answers are read.

    Raises:
        UserError: the source cannot be read, or has no such column.
    """
    from oblr_megatron.config.data import DataConfig, SourceConfig
    from oblr_megatron.config.run import validated
    from oblr_megatron.data.rows import field_of
    from oblr_megatron.data.sources import convention_of, open_source

    source = validated(SourceConfig, {"path": path}, "DATA_FILE")
    if convention_of(source).answers:  # a known benchmark has its own columns
        return DataConfig(train=(source,), question_column=question or QUESTIONS[0], answer_column=answer or ANSWERS[0])
    records = (record.value for record in open_source(source) if isinstance(record.value, dict))
    rows = list(islice(records, SEEN_ROWS))
    names = {one.lower(): one for row in rows[:1] for one in _names(row)}
    columns = {}
    for kind, given, usual in (("question", question, QUESTIONS), ("answer", answer, ANSWERS)):
        found = given or next((names[name] for name in usual if name in names), "")
        if rows and not found:
            raise UserError(
                f"no column of the usual names of the {kind}, but {', '.join(names.values())}",
                where=path,
                fix=f"name it: --{kind}-column NAME",
            )
        columns[f"{kind}_column"] = found or usual[0]
    if columns["question_column"] == "instruction" and not question and any(row.get("input") for row in rows):
        raise UserError(
            f"the question stands in two of the columns {', '.join(rows[0])}: instruction and input",
            where=path,
            fix="join them into one, or name the one to read: --question-column NAME",
        )
    answers = [str(field_of(row, columns["answer_column"])) for row in rows]
    for convention, mark in (("gsm8k", "####"), ("math", "\\boxed{")):
        if rows and sum(mark in one for one in answers) >= MOST * len(answers):
            own = {"question_column": columns["question_column"], "answer_column": columns["answer_column"]}
            source = validated(SourceConfig, {"path": path, "convention": convention, **own}, "DATA_FILE")
    return DataConfig(train=(source,), **columns)


def _names(row: dict[str, Any]) -> list[str]:
    """The columns of a row, and the fields of a column as "a.b"."""
    inner = [f"{name}.{field}" for name, value in row.items() if isinstance(value, dict) for field in value]
    return [*row, *inner]


def settings(model: HFDir, data: DataConfig, out: Path, *, on_gpu: bool, ranks: int = 1) -> Sections:
    """The keys of a first config, for a machine with or without GPUs. Each rank is a replica of the model.

    Raises:
        UserError: no row can be used.
    """
    from oblr_megatron.data.rows import asked_text, read_rows
    from oblr_megatron.data.training import training_sets
    from oblr_megatron.observe.performance.flops import total_parameters

    positions = int(model.config.get("max_position_embeddings", 4 * RESPONSE_TOKENS))
    tokenizer = model.tokenizer()
    chat = getattr(tokenizer, "chat_template", None)
    folds = -(-LEAST_FOLDS // ranks) * ranks
    seen = [] if data.train[0].gym_task else read_rows(data.train[0], data, [], training=True)
    rows = list(islice(seen, READ_ROWS))
    turns = [row.question for row in rows if not isinstance(row.question, str)]
    talk, endless = bool(chat and rows) and len(turns) == len(rows), bool(chat) and not ends_turns(model, tokenizer)
    if endless and not any(len(each) > 1 for each in turns):
        chat, talk = None, False
    reward, why, template = _reward(data, tokenizer, [row.answer for row in rows])
    own = _own_form([asked_text(row.question) for row in rows]) if reward == "math" else ""
    if own:
        reward, why = FORMS[own][0], why.replace(FORMS["\\boxed"][1], FORMS[own][1])
        template = "{question}"
    plain = f" {PLAIN}" if endless and not chat else ""
    asked = {"template": (template, f"The prompt around a row's question.{plain}")}
    if talk:  # rendered as they are, so that a template would not be used
        asked, told = {}, all(each[0]["role"] == "system" for each in turns)
        if reward == "math" and not own and not told:
            asked = {"system_prompt": (ASKED, "For rows without a system turn: the reward needs the box.")}
        elif reward == "math" and not own:
            why += " The rows do not ask for the box, and have system turns of their own: ask there."
    thinks = THINKING in str(chat)
    changes: dict[str, Any] = {"chat_template": bool(chat), "max_prompt_tokens": max(1, positions // 2)}
    changes |= {key: value for key, (value, _) in asked.items()}
    changes |= {"chat_template_options": {THINKING: False}} if thinks else {}
    data = data.model_copy(update=changes)
    [prompts] = training_sets(data, tokenizer, {})
    lengths = sorted(len(one.token_ids) for one in prompts)
    kept = lengths[int(KEPT * (len(lengths) - 1))]
    longest = min(data.max_prompt_tokens, max(16, 1 << (kept - 1).bit_length()))  # up to a power of two
    rate = next(rate for below, rate in RATES if total_parameters(model.config) < below)
    columns = {"question": data.question_column, "answer": data.answer_column}
    always = any(one.text.rstrip().endswith("<think>") for one in islice(prompts, 1))
    response = max(1, min(THOUGHT_TOKENS if always else RESPONSE_TOKENS, positions - longest))
    shared = f"Tokens. Longer responses are cut. Prompt and response share the model's {positions} positions."
    shared += " This model always thinks first: raise it if many are cut." if always else ""
    return {
        "": {
            "run_dir": (f"run/{out.stem}", "Output: metrics, report, checkpoints, trained model. Must be new."),
            "num_steps": (100, "Optimizer steps."),
            "num_prompts": (4 * folds, "Prompts of a step, a multiple of algo.snr.num_folds."),
            "group_size": (8, "Responses to each prompt."),
        },
        "model": {
            "path": (str(model.path), "The model to start from."),
            "dtype": ("bfloat16", "The usual dtype on GPUs.") if on_gpu else ("float32", 'On GPUs take "bfloat16".'),
        },
        "data": {
            **_source(data.train[0]),
            **{f"{one}_column": (name, f"Column of the {one}.") for one, name in columns.items() if name != one},
            **asked,
            **(
                {
                    "chat_template": (
                        True,
                        TALK + f" {ENDLESS}" * endless if talk else "The template is a user's turn for a chat model.",
                    )
                }
                if chat
                else {}
            ),
            **({f"chat_template_options.{THINKING}": (False, NO_THOUGHTS)} if thinks else {}),
            "max_prompt_tokens": (
                longest,
                f"Tokens. Longer prompts are dropped; the longest has {lengths[-1]}.",
            ),
        },
        "rollout": {"max_response_tokens": (response, shared)},
        "reward": {"name": (reward, why)},
        "algo": {"snr.num_folds": (folds, FOLDS)},
        "optimizer": {
            "lr": (rate, "Learning rate: 5e-4 for tiny models, 3e-5 for 0.1B parameters, 1e-6 for 0.6B and more."),
            "lr_warmup_steps": (10, "Steps in which the rate rises: the first updates are the noisiest."),
        },
    }


def ends_turns(model: HFDir, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a stop token of the model ends a turn of its chat template.

    Base models may ship the template of their chat models, but never learned to end a turn. Their responses would run
    on to the limit.
    """
    from oblr_megatron.engine.identity import stop_tokens

    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "response"}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001  a template may refuse anything; the run renders its own prompts
        return True
    after = tokenizer.encode(text.rpartition("response")[2].lstrip(), add_special_tokens=False)
    return not after or after[0] in stop_tokens(model)


def _source(source: SourceConfig) -> dict[str, tuple[str | int | float, str]]:
    """The keys of the training rows."""
    if not source.convention:
        return {"train": (source.path, "Training rows.")}
    return {
        "train.path": (source.path, "Training rows."),
        "train.convention": (source.convention, "How their answers are read (docs/data.md)."),
        "train.question_column": (source.question_column or "", "Column of the question."),
        "train.answer_column": (source.answer_column or "", "Column of the answer."),
    }


def _own_form(said: Sequence[str]) -> str:
    """The form of answer that most rows ask for, a key of FORMS; empty if they ask for none."""
    return next((form for form in FORMS if said and sum(form in one.lower() for one in said) >= MOST * len(said)), "")


def _reward(data: DataConfig, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> tuple[str, str, str]:
    r"""(reward.name, comment, data.template): "math" for mathematical answers, if the model can write \boxed{}."""

    def writes(text: str) -> bool:
        return text in str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))

    if data.train[0].gym_task:
        own = "The task's own score, 0 to 1, of"
        if writes("<answer>") and writes("</answer>"):
            return "reasoning_gym", f"{own} the last <answer>...</answer>.", GYM_TASK
        return "reasoning_gym:whole", f"{own} the whole response.", "{question}"
    mathematical = sum(MATHEMATICAL.fullmatch(answer.strip()) is not None for answer in answers)
    own = 'Or "package.module:function" of your own (docs/rewards.md).'
    if writes(BOX) and answers and mathematical >= MOST * len(answers):
        return "math", rf"1 if the last \boxed{{...}} equals the answer, else 0. {own}", TASK
    return "exact_match", f"1 if the whole response is the answer, else 0. {own}", "{question}"


def document(sections: Sections) -> str:
    """The TOML file: each key below its comment."""
    lines = ["# Written by `oblr-megatron init`. docs/config.md lists every key; paths start at the current directory."]
    for section, keys in sections.items():
        lines += ["", f"[{section}]"] if section else []
        for key, (value, comment) in keys.items():
            lines += [f"# {comment}", f"{key} = {json.dumps(value, ensure_ascii=False)}"]
    return "\n".join(lines) + "\n"
