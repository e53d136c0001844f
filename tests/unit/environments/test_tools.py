"""Tools, tool calls, and what the chat template writes between turns.

Oracle for observations: the template's rendering of the whole conversation. Not covered: the loop with an engine
(tests/e2e/test_environment_runs.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oblr_megatron.config import Config, parse_config
from oblr_megatron.engine.turns import Turn
from oblr_megatron.environments.episode import EpisodeEngine, observation_text
from oblr_megatron.environments.messages import Begin, SampleCall
from oblr_megatron.environments.registry import check_environment, data_for, schemas
from oblr_megatron.environments.tool_loop import MOST_CALLS, tool_calls, tool_loop
from oblr_megatron.environments.tools import Toolbox
from oblr_megatron.errors import UserError
from oblr_megatron.types import Prompt
from tests.tiny import make_tokenizer
from tests.unit.processes.conftest import unhurried

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "tools_cpu"))
from products import EOS, build_tokenizer  # noqa: E402

CALCULATE = f"{ROOT}/examples/tools_cpu/calculator.py:calculate"
HERE = "tests.unit.environments.tools"
QWEN3 = """\
{%- for message in messages %}{% if message.role == 'tool' %}\
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% elif message.role == 'assistant' and loop.last %}<|im_start|>assistant
<think>

</think>

{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""Qwen3's treatment of tools and of thinking: a turn is rendered otherwise when it is the last."""


@pytest.fixture(scope="module")
def box() -> Iterator[Toolbox]:
    names = ("add", "sleeps", "meets", "patient", "talks")
    box = Toolbox([CALCULATE, *(f"{HERE}:{name}" for name in names)], num_workers=2, deadline_s=1.0)
    yield box
    box.close()


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("calculate", {"expression": "37*84"}, "3108"),
        ("add", {"first": 2}, "3"),
        ("patient", {"seconds": 0}, "waited"),
        ("calculate", {"expression": "__import__('os')"}, "Error: ValueError: give whole numbers with + - * // and "),
        ("calculate", {}, "Error: TypeError: "),
        ("sleeps", {"seconds": 30}, "Error: the tool took longer than 1 seconds"),
        ("patient", {"seconds": 30}, "Error: the tool took longer than 1 seconds"),
        ("divide", {}, "Error: there is no tool 'divide'; the tools are calculate, add, sleeps, meets, patient"),
        ("talks", {"count": 10_001}, "x" * 10_000 + " ... (the rest is cut)"),
    ],
)
def test_calls(
    box: Toolbox, tool: str, arguments: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhurried(monkeypatch, f"{HERE}:sleeps")  # a worker itself answers for a late async call
    assert asyncio.run(box.call(tool, arguments)).startswith(expected)


def test_a_tool_is_found_after_a_call_that_changed_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("import os\n\ndef moves():\n    os.chdir('/')\n    return 'moved'\n")
    monkeypatch.chdir(tmp_path)
    with closing(Toolbox(["own.py:moves"], num_workers=1, deadline_s=30.0)) as box:
        assert [asyncio.run(box.call("moves", {})) for _ in range(2)] == ["moved", "moved"]


def test_calls_run_at_the_same_time(box: Toolbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)

    async def both() -> list[str]:
        return list(await asyncio.gather(*(box.call("meets", {"place": str(tmp_path), "own": one}) for one in "ab")))

    assert asyncio.run(both()) == ["met", "met"]


def test_the_calls_in_a_turn() -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"first": 1}}\n</tool_call>'
    assert tool_calls(f"so {good} and <tool_call>{{nonsense}}</tool_call>") == [("add", {"first": 1}), None]
    assert not tool_calls("4") and not tool_calls("<tool_call>unfinished")
    for text in ("[]", "1", '{"name": 3}', '{"name": "f", "arguments": 7}', "[" * 100_000, '{"arguments": {}}'):
        assert tool_calls(f"<tool_call>{text}</tool_call>") == [None], text
    assert tool_calls(f"<tool_call>{good}{good}") == [None, ("add", {"first": 1})], "a call ends at the first end"
    assert not tool_calls("<tool_call>" * 50_000), "in linear time: this took minutes"


def test_a_turn_makes_so_many_calls_and_one_that_was_cut_none() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    turns = [Turn((5,), (-0.1,), call * 40, "stop"), Turn((6,), (-0.1,), call, "length")]
    made = []

    async def ask(asked: SampleCall) -> Turn:
        return turns.pop(0)

    async def add(name: str, arguments: object) -> str:
        made.append(name)
        return "3"

    prompt, tokenizer = Prompt(0, "p", "p", (5,), "", ""), build_tokenizer()
    tokenizer.chat_template = QWEN3
    engine = EpisodeEngine(Begin(0, prompt, 1, 10_000), tokenizer, len(tokenizer), 4, ask, add)
    episode = asyncio.run(tool_loop(engine, prompt, 0))
    assert made == ["add"] * MOST_CALLS and not turns
    read = tokenizer.decode(episode.tokens)
    assert read.count("<tool_response>\n3\n") == 32 and read.count("<tool_response>\n") == 40, "8 errors"
    assert (episode.tokens[0], episode.tokens[-1]) == (5, 6)


@pytest.mark.parametrize("results", [["42"], ["42", "Error: 7"]])
def test_an_observation_is_what_the_template_writes(results: list[str]) -> None:
    """With the policy's turn before it, it is the rendering of the whole conversation."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = QWEN3
    turns = [{"role": "user", "content": "37*84"}]
    prompt = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    own = "<tool_call>\n1\n</tool_call>"
    messages = [{"role": "tool", "content": result} for result in results]
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": own}, *messages], tokenize=False, add_generation_prompt=True
    )
    assert prompt + own + EOS + observation_text(tokenizer, messages, EOS) == whole
    assert observation_text(tokenizer, messages, "").startswith(EOS)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ValueError, match="leaves out"):
        observation_text(tokenizer, messages, EOS)


def test_every_turn_begins_with_the_template_options_of_the_prompt() -> None:
    tokenizer, options = build_tokenizer(), {"enable_thinking": False}
    tokenizer.chat_template = QWEN3
    question, results = [{"role": "user", "content": "37*84"}], [{"role": "tool", "content": "42"}]
    prompt = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **options))
    _, begin, beginning = prompt.rpartition("<|im_start|>")
    assert "<think>" in beginning
    assert observation_text(tokenizer, results, EOS, options).endswith(begin + beginning)
    assert not observation_text(tokenizer, results, EOS).endswith(begin + beginning)


def config_of(environment: object, **sections: object) -> Config:
    table = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t", "chat_template": True}}
    return parse_config(table | sections | {"rollout": {"environment": environment}})


def test_the_prompt_describes_the_tools() -> None:
    config = config_of({"function": "tool_loop", "tools": [CALCULATE, f"{HERE}:add"]})
    check_environment(config)
    data = data_for(config, make_tokenizer())
    assert data.keep_columns
    tools = data.chat_template_options["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["calculate", "add"]
    assert tools[1]["function"]["parameters"]["properties"]["second"]["type"] == "integer"
    assert json.loads(json.dumps(tools)) == tools
    assert make_tokenizer().chat_template is None and "tools" not in config.data.chat_template_options


@pytest.mark.parametrize("form", ['{"name": function name, "parameters": dictionary}', "<tool_call>\n<function=name>"])
def test_tool_loop_refuses_templates_with_calls_that_it_cannot_read(form: str) -> None:
    """Those of Llama 3.1 and Qwen3-Coder; an environment of the user's own may read them."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{{% if tools %}}Answer with {form}{{% endif %}}{{{{ messages }}}}"
    with pytest.raises(UserError, match="tool calls of another form"):
        data_for(config_of({"function": "tool_loop", "tools": [CALCULATE]}), tokenizer)
    own = {"function": "tests.e2e.environments:turns", "tools": [CALCULATE]}
    assert data_for(config_of(own), tokenizer).chat_template_options["tools"]


def test_a_tool_is_described_by_the_name_that_the_toolbox_knows() -> None:
    """A static method or another name of a function: the function's own name is not the one that is called."""
    described = schemas([f"{HERE}:Tools.total", f"{HERE}:plus"])
    assert [tool["function"]["name"] for tool in described] == ["Tools.total", "plus"]


def test_the_short_form() -> None:
    config = config_of("tests.e2e.environments:turns")
    assert config.rollout.environment.function == "tests.e2e.environments:turns"
    check_environment(config)


@pytest.mark.parametrize(
    ("environment", "sections", "named"),
    [
        ("loop", {}, "unknown environment"),
        ("nowhere:f", {}, "cannot be imported"),
        (f"{HERE}:add", {}, "not an async function"),
        (f"{HERE}:patient", {}, "engine, prompt, seed"),
        ({"function": "tool_loop", "tools": ["nowhere:f"]}, {}, "cannot be imported"),
        ({"function": "tool_loop", "tools": [f"{HERE}:untyped"]}, {}, "cannot be described"),
        ({"function": "tool_loop", "tools": [f"{HERE}:add", f"{HERE}:add"]}, {}, "same name"),
        ("tool_loop", {}, "needs tools"),
        ({"function": "tool_loop", "tools": [CALCULATE]}, {"data": {"train": "t"}}, "chat template"),
    ],
)
def test_refusals(environment: object, sections: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_environment(config_of(environment, **sections))
    assert named in str(caught.value) and "rollout.environment" in caught.value.where


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"reward": {"name": "environment"}}, "rollout.environment is not set"),
        ({"rollout": {"environment": {"tools": ["a:b"]}}}, "has no function"),
        ({"rollout": {"environment": "tool_loop"}, "reward": {"name": "environment"}}, "gives no reward"),
        ({"rollout": {"environment": "a:b", "speculation": "ngram"}}, "speculation"),
        ({"rollout": {"environment": "a:b", "servers": "http://127.0.0.1:1"}}, "servers"),
        ({"rollout": {"environment": {"function": "a:b", "turns": 3}}}, "max_turns"),
    ],
)
def test_contradictions(table: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_config({"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}} | table)
    assert named in str(caught.value)


def test_schemas_name_the_tool_that_is_wrong() -> None:
    with pytest.raises(UserError) as caught:
        schemas([CALCULATE, "nowhere:f"])
    assert "nowhere:f" in str(caught.value)
