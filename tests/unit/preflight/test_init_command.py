"""`init`: the values that it derives from model and rows, and that a refusal writes nothing.

tests/e2e/test_first_run.py trains on its output. Oracle: the config's own reader.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.cli import main
from oblr_megatron.config import Config, load_config, parse_config
from oblr_megatron.config.data import DataConfig
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.rows import read_rows
from oblr_megatron.errors import EXIT_OK, EXIT_USER, UserError
from oblr_megatron.observe.performance import flops
from oblr_megatron.preflight.init_command import document, settings
from oblr_megatron.preflight.inputs import preflight
from tests.tiny import make_hf_dir

SUMS = [{"question": f"t{n} t{n + 1}", "answer": f"{2 * n + 1}"} for n in range(2, 12)]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows 35 words."""
    return make_hf_dir(tmp_path_factory.mktemp("words") / "model", head_dim=32)


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a token for each byte, which can write \\boxed{}, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    path = tmp_path_factory.mktemp("bytes") / "model"
    make_hf_dir(path, head_dim=32, vocab_size=len(alphabet), max_position_embeddings=2048)
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT).save_pretrained(path)
    return path


def written(path: Path, model: Path, rows: list[dict[str, Any]], *options: str) -> Config:
    data, out = path / "rows.jsonl", path / "first.toml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", str(model), str(data), "--out", str(out), *options]) == EXIT_OK
    assert [file.name for file in path.iterdir()].count("first.toml") == 1 and len(list(path.iterdir())) == 2
    return load_config(out)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_model_without_the_letters_of_a_box_is_scored_by_its_whole_response(tmp_path: Path, words: Path) -> None:
    config = written(tmp_path, words, SUMS)
    assert (config.reward.name, config.data.template, config.data.chat_template) == ("exact_match", "{question}", False)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (16, 112)  # of 128 positions
    assert config.run_dir == Path("run/first") and config.optimizer.lr == 5e-4 and config.model.path == words


@pytest.mark.parametrize(("parameters", "rate"), [(4e7, 5e-4), (1.35e8, 3e-5), (5.96e8, 1e-6), (8.2e9, 1e-6)])
def test_the_rate_follows_the_size(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch, parameters: float, rate: float
) -> None:
    monkeypatch.setattr(flops, "total_parameters", lambda _: int(parameters))
    assert written(tmp_path, words, SUMS).optimizer.lr == rate


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["12", "-3.5", "1/2", "1,000"], "math"),
        (["\\frac{1}{2}", "x^2", "$3$", "7%"], "math"),
        (["12", "Paris", "yes", "no"], "exact_match"),
        (["a", "b"], "exact_match"),
    ],
)
def test_mathematical_answers_are_compared_as_mathematics(
    answers: list[str], reward: str, tmp_path: Path, bytes_model: Path
) -> None:
    rows = [{"question": f"What is {n}?", "answer": answer} for n, answer in enumerate(answers)]
    config = written(tmp_path, bytes_model, rows)
    assert config.reward.name == reward and config.data.chat_template
    assert ("\\boxed{}" in config.data.template) == (reward == "math")


@pytest.mark.parametrize(("switch", "options"), [("", {}), ("enable_thinking", {"enable_thinking": False})])
def test_a_model_that_can_think_is_asked_not_to(
    switch: str, options: dict[str, bool], tmp_path: Path, bytes_model: Path
) -> None:
    """512 tokens would cut most thoughts. The option is written only if the template reads it."""
    (tmp_path / "run").mkdir()
    model = shutil.copytree(bytes_model, tmp_path / "run" / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = CHAT + (f"{{% if {switch} is false %}}!{{% endif %}}" if switch else "")
    tokenizer.save_pretrained(model)
    (tmp_path / "here").mkdir()
    assert written(tmp_path / "here", model, SUMS).data.chat_template_options == options


@pytest.mark.parametrize(("opened", "tokens"), [("assistant:", 512), ("<think>\n", 1920)])
def test_a_model_that_always_thinks_gets_long_responses(
    opened: str, tokens: int, tmp_path: Path, bytes_model: Path
) -> None:
    """Its template has no switch, and opens the thought. The model has 2,048 positions."""
    (tmp_path / "run").mkdir()
    model = shutil.copytree(bytes_model, tmp_path / "run" / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = f"{CHAT}{{% if add_generation_prompt %}}{opened}{{% endif %}}"
    tokenizer.save_pretrained(model)
    (tmp_path / "here").mkdir()
    assert written(tmp_path / "here", model, SUMS).rollout.max_response_tokens == tokens


def conversation(question: str, answer: str, system: str = "") -> dict[str, Any]:
    """A row as verl writes it."""
    turns = [{"role": "system", "content": system}] if system else []
    return {"prompt": [*turns, {"role": "user", "content": question}], "reward_model": {"ground_truth": answer}}


@pytest.mark.parametrize(
    ("stop", "rows", "chat"),
    [
        ("~", SUMS, True),
        ("!", SUMS, False),
        ("!", [conversation("t2 t3", "5")], False),
        ("!", [conversation("t2 t3", "5", "Add.")], True),  # has no other form
    ],
)
def test_a_model_whose_stop_token_ends_no_turn_gets_plain_text(
    stop: str, rows: list[dict[str, Any]], chat: bool, tmp_path: Path, bytes_model: Path
) -> None:
    """Base models of Qwen ship the chat template, and stop at the end of a text alone."""
    (tmp_path / "run").mkdir()
    model = shutil.copytree(bytes_model, tmp_path / "run" / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = CHAT.replace("{% endfor %}", "~{% endfor %}")
    tokenizer.eos_token = stop
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").unlink(missing_ok=True)
    table = json.loads((model / "config.json").read_text()) | {"eos_token_id": tokenizer.convert_tokens_to_ids(stop)}
    (model / "config.json").write_text(json.dumps(table))
    (tmp_path / "here").mkdir()
    assert written(tmp_path / "here", model, rows).data.chat_template is chat
    text = (tmp_path / "here" / "first.toml").read_text()
    assert ("do not end its turns" in text) == (chat and stop == "!")


def test_a_small_cache_is_refused_where_engines_start(tmp_path: Path, words: Path) -> None:
    """`init` raises it later."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    table = {"run_dir": "run", "model": {"path": str(words)}, "data": {"train": "rows.jsonl", "max_prompt_tokens": 16}}
    config = parse_config(table | {"rollout": {"max_response_tokens": 64, "kv_cache_gib": 1e-6}})
    preflight(config, 1, engines=False)
    with pytest.raises(UserError, match=r"KV cache holds .* tokens, but one sequence has up to 80"):
        preflight(config, 1)


@pytest.mark.parametrize(("ranks", "folds"), [(1, 8), (3, 9), (6, 12), (8, 8), (16, 16)])
def test_every_gpu_has_folds(ranks: int, folds: int, tmp_path: Path, words: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    data = DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl")})
    sections = settings(check_hf_dir(words), data, tmp_path / "first.toml", on_gpu=True, ranks=ranks)
    config = parse_config(tomllib.loads(document(sections)))
    assert (config.algo.snr.num_folds, config.num_prompts) == (folds, 4 * folds)


@pytest.mark.parametrize(("on_gpu", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_trains_in_bfloat16(on_gpu: bool, dtype: str, tmp_path: Path, words: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    data = DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl")})
    sections = settings(check_hf_dir(words), data, tmp_path / "first.toml", on_gpu=on_gpu)
    config = parse_config(tomllib.loads(document(sections)))
    assert config.model.dtype == dtype and config.algo.snr.num_folds == 8


def test_prompts_are_measured_with_their_template_and_a_few_long_ones_are_dropped(
    tmp_path: Path, bytes_model: Path
) -> None:
    """200 bytes and "user: " need 256 tokens; 1 of 200 rows is longer."""
    rows = [{"question": f"{n:03d}".rjust(200 if n else 900), "answer": "yes"} for n in range(200)]
    config = written(tmp_path, bytes_model, rows)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (256, 512)
    assert "the longest has 906" in (tmp_path / "first.toml").read_text()


@pytest.mark.parametrize(
    ("columns", "options", "found"),
    [
        (("problem", "solution"), [], ("problem", "solution")),
        (("prompt", "answer"), [], ("prompt", "answer")),
        (("frage", "antwort"), ["--question-column", "frage", "--answer-column", "antwort"], ("frage", "antwort")),
    ],
)
def test_columns(
    columns: tuple[str, str], options: list[str], found: tuple[str, str], tmp_path: Path, words: Path
) -> None:
    rows = [dict(zip(columns, row.values(), strict=True)) for row in SUMS]
    config = written(tmp_path, words, rows, *options)
    assert (config.data.question_column, config.data.answer_column) == found


@pytest.mark.parametrize("rows", ["", "{}\n", "[1]\n", '{"question": "t2"}\n', '{"a": "t2", "b": "3"}\n'])
def test_rows_without_use_are_refused(
    rows: str, tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    assert main(["init", str(words), "rows.jsonl"]) == EXIT_USER
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "rows.jsonl" in errors[0]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_run_directory_in_use_is_refused(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(SUMS[0]) + "\n")
    (tmp_path / "run" / "config").mkdir(parents=True)
    (tmp_path / "run" / "config" / "thesis.txt").touch()
    assert main(["init", str(words), "rows.jsonl"]) == EXIT_USER
    assert "run/config" in capsys.readouterr().err and not (tmp_path / "config.toml").exists()


GSM8K = "There are 2+{n}=<<2+{n}=0>>. So\n#### {n},000"
BOXED = "It is 2. So \\boxed{{\\frac{{{n}}}{{7}}}}."


@pytest.mark.parametrize(
    ("source", "row", "convention", "columns"),
    [
        ("GSM8K", {"question": "q", "answer": GSM8K}, "gsm8k", ("question", "answer")),
        ("GSM8K, other names", {"Problem": "q", "Solution": GSM8K}, "gsm8k", ("Problem", "Solution")),
        ("MATH", {"problem": "q", "level": "Level 5", "solution": BOXED}, "math", ("problem", "solution")),
        ("verl", {"prompt": "q", "reward_model": {"ground_truth": "{n}"}}, "", ("prompt", "reward_model.ground_truth")),
        ("AIME 2024", {"ID": 1, "Problem": "q", "Answer": "{n}"}, "", ("Problem", "Answer")),
        ("Alpaca", {"instruction": "q", "output": "{n}"}, "", ("instruction", "output")),
    ],
)
def test_the_usual_sets_are_recognized_by_their_rows(
    source: str, row: dict[str, Any], convention: str, columns: tuple[str, str], tmp_path: Path, bytes_model: Path
) -> None:
    """Oracle: the question and the bare gold that the config reads."""

    def filled(value: Any, n: int) -> Any:
        if isinstance(value, dict):
            return {key: filled(one, n) for key, one in value.items()}
        return f"What is {n}?" if value == "q" else value.format(n=n) if isinstance(value, str) else value

    config = written(tmp_path, bytes_model, [filled(row, n) for n in range(5)])
    [train] = config.data.train
    assert train.convention == convention and config.reward.name == "math", source
    assert (train.question_column or config.data.question_column) == columns[0]
    assert (train.answer_column or config.data.answer_column) == columns[1]
    golds = [one.answer for one in read_rows(train, config.data, [], training=True)]
    wanted = {"gsm8k": "{n}000", "math": "\\frac{{{n}}}{{7}}", "": "{n}"}[convention]
    assert golds == [wanted.format(n=n) for n in range(5)]


@pytest.mark.parametrize(
    ("request_", "reward", "system"),
    [
        ('Let\'s think. Output the final answer after "####".', "math:gsm8k", False),
        ("Put it within \\boxed{}.", "math", False),
        ("The last line should be of the form Answer: $Answer (without quotes).", "math:last_line", False),
        ("", "math", True),
    ],
)
def test_conversations_ask_for_what_the_reward_reads(
    request_: str, reward: str, system: bool, tmp_path: Path, bytes_model: Path
) -> None:
    """verl's prompts are messages. A template around the question would not reach the model."""
    rows = [conversation(f"{n}+1? {request_}", f"{n + 1}") for n in range(5)]
    config = written(tmp_path, bytes_model, rows)
    assert (config.reward.name, config.data.template, config.data.chat_template) == (reward, "{question}", True)
    assert ("\\boxed{}" in config.data.system_prompt) == system
    tokenizer = check_hf_dir(bytes_model).tokenizer()
    prompt = next(iter(read_prompts(config.data.train[0], config.data, tokenizer, training=True))).text
    assert ("####" in prompt, "\\boxed{}" in prompt) == (reward == "math:gsm8k", reward == "math")


@pytest.mark.parametrize(
    ("request_", "reward", "asked"),
    [("Put it after ####.", "math:gsm8k", ""), ("Use \\boxed{}.", "math", ""), ("", "math", "\\boxed{}")],
)
def test_a_text_that_asks_for_a_form_gets_no_other_request(
    request_: str, reward: str, asked: str, tmp_path: Path, bytes_model: Path
) -> None:
    rows = [{"question": f"{n}+1? {request_}", "answer": f"{n + 1}"} for n in range(5)]
    config = written(tmp_path, bytes_model, rows)
    assert config.reward.name == reward and config.data.template.removeprefix("{question}").count("boxed") == bool(
        asked
    )


def test_system_turns_of_the_rows_stay_alone(tmp_path: Path, bytes_model: Path) -> None:
    config = written(tmp_path, bytes_model, [conversation(f"{n}+1?", f"{n + 1}", "Add.") for n in range(5)])
    assert (config.reward.name, config.data.system_prompt) == ("math", "")
    assert "have system turns of their own: ask there" in (tmp_path / "first.toml").read_text()


def test_lengths_are_those_of_distinct_questions(tmp_path: Path, bytes_model: Path) -> None:
    """DAPO-Math-17k has each problem a hundred times."""
    rows = [{"question": f"{n}".rjust(10), "answer": "yes"} for n in range(99)]
    rows += [{"question": "x" * 500, "answer": "yes"}] * 300
    config = written(tmp_path, bytes_model, rows)
    assert config.data.max_prompt_tokens == 16


@pytest.mark.parametrize(
    ("source", "row", "named"),
    [
        ("ShareGPT", {"conversations": [{"from": "human", "value": "1"}]}, "--question-column"),
        ("UltraChat", {"messages": [{"role": "user", "content": "1"}], "prompt_id": "0"}, "--question-column"),
        ("TRL, prompts alone", {"prompt": "1+1="}, "--answer-column"),
        ("a set of its own", {"question": "1+1=", "gold_answer": "2"}, "--answer-column"),
        ("LLaMA-Factory, alpaca", {"instruction": "Add.", "input": "1+1=", "output": "2"}, "--question-column"),
    ],
)
def test_a_set_without_the_usual_columns_is_refused_with_its_own(
    source: str, row: dict[str, Any], named: str, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["init", str(words), "rows.jsonl"]) == EXIT_USER
    error = capsys.readouterr().err.splitlines()[-1]
    assert named in error and all(name in error for name in row), source
