r"""Rows, templates and conversations in the forms of the wild: read, skipped with a reason, or refused with a remedy.

`source` is the thread or file that shows the form. Not covered: parquet and hub sets (test_sources.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oblr_megatron.errors import UserError
from tests.unit.data.conftest import stream, write_rows

USER: dict[str, Any] = {"role": "user", "content": "1+1="}
PARTS: list[dict[str, Any]] = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
ASKS = "{% for m in messages %}{% if 'tool_calls' in m and m['tool_calls']|length != 1 %}{{ raise_exception('no') }}"
ASKS += "{% endif %}{% for c in m['tool_calls'] or [] %}{% if c.function.arguments | length != 2 %}"
ASKS += "{{ raise_exception('gaps') }}{% endif %}{% endfor %}{{ m['content'] }}{% endfor %}"
OPENAI = "openai/openai-python src/openai/types/chat/chat_completion_content_part"
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PADDED = CALLS | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": {"a": 2, "b": 2, "city": None}}}]}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "4"}
IMAGE = [{"type": "image", "image": "a.png"}, PARTS[0]]


@pytest.mark.parametrize(
    ("source", "question", "expected"),
    [
        ("huggingface/trl docs/source/dataset_formats.md, prompt-only", [USER], "1+1="),
        ("the same, Harmony", [{"role": "developer", "content": ""}, USER], "1+1="),
        ("unslothai/unsloth-zoo#372, null-padded", [USER | {"tool_calls": None, "name": None}], "1+1="),
        ("the same", [{"role": "system", "content": "", "tool_calls": None}, USER], "1+1="),
        ("the same, a part", [{"role": "user", "content": [PARTS[0] | {"image": None}, PARTS[1]]}], "1+1="),
        (f"{OPENAI}_text_param.py", [{"role": "user", "content": PARTS}], "1+1="),
        (f"{OPENAI}_text_param.py", [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}], "1+1="),
        ("tulerfeng/Video-R1#36, an image", [{"role": "user", "content": IMAGE}], None),
        ("hiyouga/LLaMA-Factory data/README.md, sharegpt", [{"from": "human", "value": "1+1="}], None),
        ("the same, openai", [USER, {"role": "assistant", "content": "2"}], None),
        (
            "huggingface/trl docs/source/dataset_formats.md, tools",
            [USER, {"role": "assistant", "tool_calls": []}],
            None,
        ),
        ("openai/openai-python chat_completion_message.py", [USER, CALLS, TOOL, USER], "1+1=41+1="),
        ("the same, null-padded by arrow", [USER, PADDED, TOOL, USER], "1+1=41+1="),
    ],
)
def test_conversations(
    chat_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    question: list[Any],
    expected: str | None,
) -> None:
    """The template fails on a key tool_calls, as published templates do that count the calls."""
    monkeypatch.setattr(chat_tokenizer, "chat_template", ASKS)
    good: dict[str, object] = {"question": "good", "answer": "1"}
    path = write_rows(tmp_path / "rows.jsonl", [{"question": question, "answer": "2"}, good])
    prompts = stream(chat_tokenizer, path, chat_template=True, shuffle=False)
    assert len(prompts) == 1 + (expected is not None), source
    if expected is not None:
        assert prompts.next_prompts(1)[0].text == expected
    else:
        assert prompts.skipped[0].reason == "'question' is not a conversation that ends with a user turn"


def test_a_call_nested_too_deep_costs_its_row(chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    calls = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "add", "arguments": {"a": "DEEP"}}}]}
    rows: list[dict[str, object]] = [{"question": q, "answer": "2"} for q in ([USER, calls, TOOL, USER], [USER])]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text().replace('"DEEP"', "[" * 2000 + "]" * 2000))
    prompts = stream(chat_tokenizer, path, chat_template=True, shuffle=False)
    assert len(prompts) == 1 and prompts.skipped[0].reason in ("nested too deep", "not JSON")  # Python 3.12, 3.11


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (r"\boxed{}", False), (r"\frac{1}{2}", False), (r"12\text{ cm}", False), (r"3\times 4", False),
        (r"\theta", False), (r"\tan(x)", False), (r"\right)", False), (r"\rm{a}", False), (r"\rho", False),
        (r"a \neq b", False), (r"\nabla f", False), (r"\beta", False), (r"\tfrac12", False), (r"\forall x", False),
        (r"\sum_i", False), (r"\sqrt2", False), (r"\alpha", False),
        (r"\\frac{1}{2}", True), (r"\\boxed{}", True), (r"one\nTwo", True), (r"a\tb", True), (r"\tTotal", True),
        (r"x\r\nRight", True), (r"\tangent", True), (r"\n", True), (r"\nequal parts", True), (r"1\f2", True),
        (r"a \nmid b", False), (r"de\fned", False), (r"\nmid = (lo+hi)//2", True), (r"\nmid-term", True),
        (r"by\neq. (3)", True), (r"x\fPage", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("column", "before"), [("question", "1 "), ("answer", "1 "), ("answer", "")])
def test_backslashes_in_json(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, column: str, before: str, written: str, kept: bool
) -> None:
    r"""A LaTeX command with one backslash in JSON is a control character, or no JSON at all.

    Sources: HKUDS/LightRAG#3238, trishullab/PutnamBench#218, wttwins/wrong-notebook#3.
    """
    row = {"question": "1+1=", "answer": "2"} | {column: f"{before}{written} 2"}
    other = json.dumps({"question": "2+2=", "answer": "4"})
    fields = ", ".join(f'"{name}": "{value}"' for name, value in row.items())
    (tmp_path / "rows.jsonl").write_text(f"{{{fields}}}\n{other}\n")
    prompts = stream(tokenizer, tmp_path / "rows.jsonl")
    assert [skip.line for skip in prompts.skipped] == [1] * (not kept)
    assert all("backslash" in skip.reason for skip in prompts.skipped)
    if not kept:
        (tmp_path / "rows.jsonl").write_text(f"{{{fields}}}\n")
        with pytest.raises(UserError) as caught:
            stream(tokenizer, tmp_path / "rows.jsonl")
        assert "double the backslashes" in caught.value.fix


@pytest.mark.parametrize("answer", ["t2", "mid", "right", "theta"])
def test_an_answer_may_begin_with_a_letter(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, answer: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": answer}) + "\n")
    assert not stream(tokenizer, tmp_path / "rows.jsonl").skipped


@pytest.mark.parametrize("key", ["template", "system_prompt"])
@pytest.mark.parametrize(
    "text", ["{question} in \boxed{}", "{question} \frac", "{question}\text{a}", "{question}\right"]
)
def test_a_prompt_with_a_lost_backslash_is_refused(
    tokenizer: PreTrainedTokenizerFast, chat_tokenizer: PreTrainedTokenizerFast, key: str, text: str
) -> None:
    for chat, own in ((False, tokenizer), (True, chat_tokenizer)):
        with pytest.raises(UserError) as caught:
            stream(own, chat_template=chat, **dict[str, Any]({key: text}))
        assert caught.value.where == f"config: data.{key}" and "single quotes" in caught.value.fix


BODY = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TURNS = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
TURNS += "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
LLAMA = "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{{ date_string }}"
TRAINED = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
NAMED = [{"name": "default", "template": BODY}, {"name": "tool_use", "template": "{{ tools }}"}]
TUTORED = [{"role": "system", "content": "Add."}, USER]
SKIPPED, REFUSED = "skipped: ", "refused: "


@pytest.mark.parametrize(
    ("source", "template", "file", "options", "question", "expected"),
    [
        ("huggingface/text-generation-inference#3247, a file", None, BODY, {}, "1+1=", "[1+1=]"),
        ("meta-pytorch/torchforge#509, a file and a key", "old", BODY, {}, "1+1=", "[1+1=]"),
        ("EleutherAI/lm-evaluation-harness#2129, by name", NAMED, "", {}, "1+1=", "[1+1=]"),
        ("sgl-project/sglang#3385, a base model", None, "", {}, "1+1=", REFUSED + "set it to false"),
        ("EleutherAI/lm-evaluation-harness#2109", NO_SYSTEM + BODY, "", {}, TUTORED, SKIPPED + "System role not"),
        ("the same", NO_SYSTEM + BODY, "", {"system_prompt": "Add."}, "1+1=", REFUSED + "into data.template"),
        ("EricLBuehler/mistral.rs#45", TURNS + BODY, "", {}, [USER, USER], SKIPPED + "roles must alternate"),
        ("oobabooga/textgen#6692", "{{ strftime_now('%d %b %Y') }}" + BODY, "", {}, "1+1=", "26 Jul 2024[1+1=]"),
        ("sgl-project/sglang#3296", LLAMA + BODY, "", {}, "1+1=", "26 Jul 2024[1+1=]"),
        ("the same", LLAMA + BODY, "", {"chat_template_options": {"date_string": "now"}}, "1+1=", "now[1+1=]"),
        ("huggingface/transformers src/transformers/utils/chat_template_utils.py", TRAINED, "", {}, "1+1=", "1+1="),
        ("Thinking-Space/Rethinking-OPD#26", BODY, "", {"template": "{question} \\boxed{{}}"}, "1", "[1 \\boxed{{}}]"),
    ],
)
def test_templates(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    source: str,
    template: str | list[dict[str, str]] | None,
    file: str,
    options: dict[str, Any],
    question: object,
    expected: str,
) -> None:
    tokenizer.save_pretrained(tmp_path)
    if template is not None:
        content = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content | {"chat_template": template}))
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    own = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rows: list[dict[str, object]] = [{"question": question, "answer": "2"}, {"question": "good", "answer": "1"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    if expected.startswith(REFUSED):
        with pytest.raises(UserError) as caught:
            stream(own, path, chat_template=True, **options)
        assert expected.removeprefix(REFUSED) in caught.value.fix, source
        return
    prompts = stream(own, path, chat_template=True, shuffle=False, **options)
    if expected.startswith(SKIPPED):
        [skip] = prompts.skipped
        assert skip.reason == "refused by the chat template" and expected.removeprefix(SKIPPED) in skip.detail, source
    else:
        assert prompts.next_prompts(1)[0].text == expected, source


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_pointer_of_git_lfs(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(UserError) as caught:
        stream(tokenizer, tmp_path / name)
    assert "Git LFS" in caught.value.what and "git lfs pull" in caught.value.fix and caught.value.where.endswith(name)
