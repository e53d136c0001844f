"""Files, patterns, directories and hub names, read with the real `datasets`; nothing is downloaded.

Not covered: reading an existing hub data set.
"""

from __future__ import annotations

import logging
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.conventions import CONVENTIONS, PLAIN
from oblr_megatron.data.prompt_set import read_prompts
from oblr_megatron.data.sources import Record, convention_of, distinct_names, named_source, open_source
from oblr_megatron.errors import UserError
from tests.unit.data.conftest import SUMS, config, stream, sums, write_rows

ROWS = [{"question": "1+1=", "answer": 2, "task": {"level": 1}}, {"question": "2+2=", "answer": 4, "task": None}]


def records(path: object, *, training: bool = False, **values: str) -> list[Record]:
    return list(open_source(SourceConfig.model_validate({"path": str(path), **values}), training=training))


def questions(path: object, *, training: bool = False, **values: str) -> list[str]:
    return [record.value["question"] for record in records(path, training=training, **values)]


def refusal(path: object, **values: str) -> UserError:
    """The error of a source that cannot be read."""
    with pytest.raises(UserError) as caught:
        records(path, **values)
    assert caught.value.where == str(path) and "\n" not in str(caught.value)
    return caught.value


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet(tmp_path: Path, tokenizer) -> None:
    path = parquet(tmp_path / "sums.parquet", [*ROWS, {"question": None, "answer": 1, "task": None}])
    assert records(path)[:2] == [Record("sums", number, row, str(path)) for number, row in enumerate(ROWS)]
    prompts = stream(tokenizer, path, shuffle=False)
    assert [(prompt.id, prompt.text, prompt.answer) for prompt in prompts.next_prompts(2)] == [
        ("sums-0", "1+1=", "2"),
        ("sums-1", "2+2=", "4"),
    ]
    assert [skip[1:3] for skip in prompts.skipped] == [(3, "no 'question'")]


def test_answers_in_columns_of_numbers(tmp_path: Path, tokenizer) -> None:
    """A blank makes a table of whole numbers one of floats; float32 has no exact 0.1; decimals keep their digits."""
    nested = pa.struct([("gold", pa.list_(pa.float32())), ("style", pa.string())])
    columns = {
        "float16": (pa.array([0.1, 2.0, None, 0.333], pa.float16()), ["0.1", "2", "0.333"]),
        "float32": (pa.array([0.1, 2.0, None, 1e20], pa.float32()), ["0.1", "2", "1e+20"]),
        "float64": (pa.array([5.0, 0.1, None, -0.0, 2.0**53 + 2]), ["5", "0.1", "0", "9007199254740994.0"]),
        "decimal": (pa.array([Decimal("5.00"), Decimal("-0.50"), None], pa.decimal128(10, 2)), ["5", "-0.50"]),
    }
    for name, (answers, expected) in columns.items():
        table = pa.table({"question": [f"{name} {row}?" for row in range(len(answers))], "answer": answers})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        prompts = stream(tokenizer, tmp_path / f"{name}.parquet", shuffle=False)
        assert [prompt.answer for prompt in prompts.next_prompts(len(expected))] == expected
        assert [skip[1:3] for skip in prompts.skipped] == [(3, "no 'answer'")]
    values = [{"gold": [0.1, None], "style": "x"}, {"gold": None, "style": "y"}, None]
    pq.write_table(pa.table({"reward_model": pa.array(values, nested)}), tmp_path / "nested.parquet")
    assert [record.value["reward_model"] for record in records(tmp_path / "nested.parquet")] == values


def test_an_empty_shard_gives_no_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    for number, rows in enumerate((table.slice(0, 0), table, table.slice(0, 0))):
        pq.write_table(rows, tmp_path / f"train-{number}.parquet")
    assert questions(tmp_path) == questions(tmp_path / "train-*.parquet") == ["1+1=", "2+2="]
    assert questions(tmp_path / "train-0.parquet") == []


def test_a_text_of_parquet_that_is_not_utf_8_costs_its_row(tmp_path: Path, tokenizer) -> None:
    questions = pa.array([b"1+1=", b"2\xff=", b"3+3="]).view(pa.string())
    pq.write_table(pa.table({"question": questions, "answer": [2, 4, 6]}), tmp_path / "sums.parquet")
    prompts = stream(tokenizer, tmp_path / "sums.parquet", shuffle=False)
    assert [prompt.answer for prompt in prompts.next_prompts(2)] == ["2", "6"]
    assert [skip[1:3] for skip in prompts.skipped] == [(2, "not UTF-8")]


def test_a_lists_column_of_parquet_is_a_conversation(tmp_path: Path, chat_tokenizer) -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    path = parquet(tmp_path / "verl.parquet", [{"prompt": turns, "reward_model": {"ground_truth": "2", "style": "x"}}])
    source = {"path": str(path), "question_column": "prompt", "answer_column": "reward_model.ground_truth"}
    [prompt] = stream(chat_tokenizer, source, chat_template=True).next_prompts(1)
    assert (prompt.text, prompt.answer) == ("<s>Add.<u>1+1=<a>", "2")


@pytest.mark.parametrize("name", ["br[1]/sums.parquet", "sums.PARQUET", "a b/s*m?.parquet"])
def test_names_of_parquet_files_are_no_patterns(tmp_path: Path, name: str) -> None:
    path = parquet(tmp_path / name, ROWS)
    assert [record.value for record in records(path)] == list(ROWS)


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b'[{"question": "1+1=", "answer": 2},\n{"question": "2+2=", "answer": 4}]', "one JSON object per line"),
        ('{"question": "1+1=", "answer": 2}'.encode("utf-16"), "save the file as UTF-8"),
        (b"PAR1\x15\x04\xff\xfe", "name a Parquet file"),
        (b'{"question": "\\sum", "answer": 2}\n', "double the backslashes"),
    ],
)
def test_rows_that_are_not_json_lines_say_how_to_write_them(
    tmp_path: Path, tokenizer, content: bytes, fix: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    data = config(str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError) as caught:
        read_prompts(data.train[0], data, tokenizer)
    assert fix in caught.value.fix


def test_a_pattern_reads_its_files_in_order_of_their_names(tmp_path: Path, tokenizer) -> None:
    write_rows(tmp_path / "b.jsonl", ROWS[:1])
    parquet(tmp_path / "a.parquet", ROWS[1:])
    write_rows(tmp_path / "deep.jsonl", ROWS)
    found = records(tmp_path / "[ab].*")
    assert [(record.file, record.number) for record in found] == [("a", 0), ("b", 0)]
    assert [record.value["question"] for record in found] == ["2+2=", "1+1="]
    data = config(str(tmp_path / "[ab].*"), max_prompt_tokens=1)
    with pytest.raises(UserError, match=r"2 longer than .* 1 \(lines a:1: 4 tokens, b:1: 4 tokens\)"):
        read_prompts(data.train[0], data, tokenizer)
    refusal(tmp_path / "*.csv")
    for name in ("rows.csv", "rows.jsonl.gz"):
        (tmp_path / name).write_text("question,answer\n2+3?,5\n", encoding="utf-8")
        assert "JSON lines or Parquet" in refusal(tmp_path / name).fix


def test_a_directory_that_datasets_loads(tmp_path: Path) -> None:
    for split, row in zip(("train", "test"), ROWS, strict=True):
        parquet(tmp_path / "sums" / f"{split}.parquet", [row])
    assert questions(tmp_path / "sums") == ["1+1="]
    assert questions(tmp_path / "sums", split="test") == ["2+2="]
    assert questions(tmp_path / "sums", convention="gsm8k") == ["2+2="]
    assert questions(tmp_path / "sums", convention="gsm8k", training=True) == ["1+1="]
    error = refusal(tmp_path / "sums", split="dev")
    assert "'dev'" in error.what and "train, test" in error.fix
    assert "'hard'" in refusal(tmp_path / "sums", subset="hard").what


def test_the_subsets_of_a_directory(tmp_path: Path) -> None:
    for subset, row in zip(("easy", "hard"), ROWS, strict=True):
        parquet(tmp_path / subset / "train.parquet", [row])
    names = "\n".join(f"- config_name: {name}\n  data_files: {name}/*.parquet" for name in ("easy", "hard"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{names}\n---\n")
    assert questions(tmp_path, subset="hard") == ["2+2="]
    assert "easy" in refusal(tmp_path).what


def test_a_directory_saved_to_disk(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert questions(tmp_path / "one") == ["1+1=", "2+2="]
    splits = {"dev": Dataset.from_list(ROWS[:1]), "test": Dataset.from_list(ROWS[1:])}
    DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert questions(tmp_path / "two", split="dev") == ["1+1="]
    assert "'train'" in refusal(tmp_path / "two").what
    DatasetDict({"dev": splits["dev"]}).save_to_disk(tmp_path / "three")
    assert questions(tmp_path / "three") == ["1+1="], "a single split is read without its name"


@pytest.mark.parametrize("key", ["split", "subset", "revision"])
def test_a_file_has_no_parts_to_choose_from(tmp_path: Path, key: str) -> None:
    """Its rows would all be read, those of the test split among them."""
    parquet(tmp_path / "sums" / "all.parquet", ROWS)
    for path in (tmp_path / "sums" / "all.parquet", tmp_path / "sums" / "*.parquet"):
        assert f"leave {key} out" in refusal(path, **{key: "train"}).fix
    if key == "revision":
        assert "leave revision out" in refusal(tmp_path / "sums", revision="v1").fix
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert f"leave {key} out" in refusal(tmp_path / "one", **{key: "train"}).fix


def test_unreadable_sources(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("not parquet at all")
    assert "Parquet magic bytes" in refusal(tmp_path / "bad.parquet").what
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "rows.jsonl").write_text('{"question": "1+1=", "answer": 2}\n{"question": \n')
    refusal(tmp_path / "lines")  # `datasets` refuses the whole file, of which this package would skip one line
    (tmp_path / "empty").mkdir()
    assert "doesn't contain any data files" in refusal(tmp_path / "empty").what
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    refusal(tmp_path / "saved")
    for path in (tmp_path / "no.jsonl", "data/no.parquet", "word"):
        assert "gsm8k" in refusal(path).fix, "the error lists the conventions"
    unreadable = Path("/proc/self/mem")
    if unreadable.is_file():
        assert "Input/output error" in refusal(unreadable).what


def test_a_cache_of_data_sets_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's shared one, or a read-only home directory."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/sys/nobody")
    assert "HF_DATASETS_CACHE" in refusal(tmp_path).fix


@pytest.mark.parametrize(
    "values", [{"path": "gsm8k"}, {"path": "openai/gsm8k"}, {"path": "nobody/nothing", "revision": "v1"}]
)
def test_the_hub_cannot_be_reached(values: dict[str, str]) -> None:
    assert "Couldn't reach" in refusal(**values).what


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("math=math500", ("HuggingFaceH4/MATH-500", None, "test")),
        ("aime=aime24", ("HuggingFaceH4/aime_2024", None, "train")),
        ("amc=math-ai/amc23", ("math-ai/amc23", None, "test")),
        ("mine=gsm8k", ("openai/gsm8k", "main", "test")),
        ("gsm8k=owner/name", ("owner/name", None, "train")),
    ],
)
def test_the_path_chooses_the_hub_set(
    text: str, loaded: tuple[str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a set is a convention of its columns only."""
    asked = []

    def load_dataset(path: str, *, name: str | None, split: str, revision: str | None) -> Dataset:
        asked.append((path, name, split))
        return Dataset.from_list([{"problem": "1+1=", "answer": "2"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(list(open_source(named_source(text)[1]))) == 1 and asked == [loaded]


def test_a_local_path_comes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "openai" / "gsm8k" / "test.parquet", ROWS)
    monkeypatch.chdir(tmp_path)
    assert questions("openai/gsm8k", split="test") == ["1+1=", "2+2="]
    assert convention_of(SourceConfig(path="openai/gsm8k")) is PLAIN
    write_rows(tmp_path / "gsm8k", ROWS[:1])
    assert questions("gsm8k") == ["1+1="]


def test_the_convention_of_a_source() -> None:
    assert convention_of(SourceConfig(path=str(SUMS))) is PLAIN
    assert convention_of(SourceConfig(path=str(SUMS), convention="amc")) is CONVENTIONS["amc"]
    assert convention_of(SourceConfig(path="aime24")) is CONVENTIONS["aime24"]
    assert convention_of(SourceConfig(path="Hothan/OlympiadBench")) is CONVENTIONS["olympiadbench"]
    with pytest.raises(UserError, match=r"'gsm9k'.*gsm8k, math"):
        convention_of(SourceConfig(path="x", convention="gsm9k"))
    assert "'aime'" in refusal("aime").what


@pytest.mark.parametrize(
    ("text", "name", "path", "convention"),
    [
        ("gsm8k=some/test.jsonl", "gsm8k", "some/test.jsonl", "gsm8k"),
        ("mine=some/test.jsonl", "mine", "some/test.jsonl", ""),
        ("mine=aime24", "mine", "aime24", "aime24"),
        ("some/test.jsonl", "test", "some/test.jsonl", ""),
        ("some/math500.jsonl", "math500", "some/math500.jsonl", ""),
        ("runs/lr=1/test.jsonl", "test", "runs/lr=1/test.jsonl", ""),
        ("aime24", "aime24", "aime24", "aime24"),
        ("math-ai/amc23", "amc23", "math-ai/amc23", "amc23"),
        ("owner/set.v2", "set.v2", "owner/set.v2", ""),
        ("all=parts/*.parquet", "all", "parts/*.parquet", ""),
    ],
)
def test_named_source(text: str, name: str, path: str, convention: str) -> None:
    assert named_source(text) == (name, SourceConfig(path=path, convention=convention))


def test_a_file_name_may_contain_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sums(Path("gsm8k=1.jsonl"), 2)
    assert named_source("gsm8k=1.jsonl") == ("gsm8k=1", SourceConfig(path="gsm8k=1.jsonl"))


@pytest.mark.parametrize("text", ["", "a=", "p/*.jsonl", "reasoning_gym:"])
def test_arguments_without_path_or_name(text: str) -> None:
    with pytest.raises(UserError) as error:
        named_source(text)
    assert error.value.where == "--data" and repr(text) in error.value.what


def test_other_libraries_do_not_repeat_the_error_on_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "damaged.parquet"
    path.write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    refusal(path)
    requests = logging.getLogger("huggingface_hub.utils._http")

    def unreachable(path: str, **options: object) -> None:
        requests.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    assert "network" in refusal("openai/gsm8k").fix
    assert capfd.readouterr().err == ""
    assert not requests.disabled, "afterwards it speaks again"


def test_the_tokenizer_does_not_warn_of_long_prompts(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", said.append)
    monkeypatch.setattr(tokenizer, "model_max_length", 4)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})
    data = config(sums(tmp_path / "sums.jsonl", 3))
    assert len(read_prompts(data.train[0], data, tokenizer)) == 3
    assert said == []
    tokenizer("1 + 1 = 2")
    assert len(said) == 1, "by default it warns"


def test_training_files_of_one_name_are_different_sources(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled baselines tell sources and prompts apart by `source` and `id`."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("gsm8k/train", "math/train", "aime", "parts/a/x", "parts/b/x")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        sums(Path(f"{name}.jsonl"), 2, first=2 * number)
    paths = ["gsm8k/train.jsonl", "math/train.jsonl", "aime.jsonl", "parts/*/x.jsonl"]
    prompts = stream(tokenizer, paths, shuffle=False).next_prompts(10)
    assert {prompt.source for prompt in prompts} == {"gsm8k/train", "math/train", "aime", "a/x", "b/x"}
    assert {prompt.id for prompt in prompts if "train" in prompt.source} == {"train-0", "train-1"}, "as before"
    assert {prompt.source for prompt in stream(tokenizer, paths[1], shuffle=False).next_prompts(2)} == {"train"}


def test_a_column_source_keeps_its_value(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"question": f"{number}+1=", "answer": 1, "source": "train"} for number in range(2)]
    paths = [tmp_path / name / "train.jsonl" for name in "ab"]
    for path, row in zip(paths, rows, strict=True):
        path.parent.mkdir()
        write_rows(path, [row])
    assert {prompt.source for prompt in stream(tokenizer, list(map(str, paths))).next_prompts(2)} == {"train"}


def test_names_of_sources_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k.jsonl").touch()
    hub, own = {"path": "openai/gsm8k"}, {"path": "gsm8k.jsonl"}
    found = distinct_names(config([hub, own]).train)
    assert found == [{"openai/gsm8k": "openai/gsm8k"}, {"gsm8k.jsonl": f"{tmp_path.name}/gsm8k"}]
    subsets = [{"path": "owner/math", "subset": name} for name in ("algebra", "geometry", "algebra")]
    assert distinct_names(config(subsets).train) == [{"owner/math": f"math/{place}"} for place in (1, 2, 1)]
    assert distinct_names(config([own | {"weight": 1}, own | {"weight": 2}]).train) == [{}, {}]
    tasks = [{"path": "reasoning_gym:gcd", "seed": seed} for seed in (0, 1)]
    assert [list(names.values()) for names in distinct_names(config(tasks).train)] == [["gcd/1"], ["gcd/2"]]
