"""Environments by name, and their checks before a run. Imports no torch.

To add one to the package, write an async function and add a line to `ENVIRONMENTS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError
from oblr_megatron.rewards import registry as rewards
from oblr_megatron.user_functions import import_from_here, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oblr_megatron.config import Config
    from oblr_megatron.config.data import DataConfig

ENVIRONMENTS = {"tool_loop": "oblr_megatron.environments.tool_loop:tool_loop"}
"""Names of the package's own environments."""
PARAMETERS = ("engine", "prompt", "seed")
TOOLS = "config: rollout.environment.tools"


def function_of(name: str) -> Callable[..., Any]:
    """The function of an environment that `check_environment` has accepted."""
    function: Callable[..., Any] = resolve(ENVIRONMENTS.get(name, name))
    return function


def check_environment(config: Config) -> None:
    """Import the environment and its tools before the run starts.

    Raises:
        UserError: one cannot be imported, does not fit, or needs a chat template.
    """
    options, where = config.rollout.environment, "config: rollout.environment"
    if not options.function:
        return
    name = ENVIRONMENTS.get(options.function, options.function)
    if ":" not in name:
        raise UserError(
            f"unknown environment {name!r}",
            where=where,
            fix=f'use one of {", ".join(ENVIRONMENTS)}, or your own "package.module:function"',
        )
    function = import_from_here(name, f"environment {options.function!r}", where)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f"environment {name!r} is not an async function", where=where, fix="write `async def`")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as error:
        raise UserError(
            f"environment {name!r} cannot be called as function({', '.join(PARAMETERS)}): {error}",
            where=where,
            fix="give it these three parameters",
        ) from error
    schemas(options.tools)
    if options.function == "tool_loop" and not (config.data.chat_template and options.tools):
        raise UserError(
            "environment 'tool_loop' needs tools and the model's chat template, which describes them in the prompt",
            where=where,
            fix="set rollout.environment.tools and data.chat_template = true",
        )


def schemas(tools: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON schema of each tool, as chat templates take them.

    Raises:
        UserError: a tool cannot be imported, or has no types or no docstring.
    """
    names = [tool.rpartition(":")[2] for tool in tools]
    if len(set(names)) < len(names):
        raise UserError(f"two tools have the same name: {', '.join(names)}", where=TOOLS, fix="rename one of them")
    return [_schema(tool) for tool in tools]


def _schema(tool: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    function: Callable[..., Any] = import_from_here(tool, f"tool {tool!r}", TOOLS)
    if not inspect.isfunction(function):
        raise UserError(f"tool {tool!r} is not a function", where=TOOLS, fix='give "package.module:function"')
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers has several classes for it, without a common base
        raise UserError(
            f"tool {tool!r} cannot be described: {error}",
            where=TOOLS,
            fix="give every parameter a type, and a line under Args: in the docstring",
        ) from error
    schema["function"]["name"] = tool.rpartition(":")[2]  # the toolbox knows it by this; the function may have another
    return schema


def data_for(config: Config, tokenizer: PreTrainedTokenizerBase) -> DataConfig:
    """Section [data] with what the reward and the environment need: the columns of rows, the tools in the template.

    Raises:
        UserError: the chat template asks for tool calls that tool_loop does not read.
    """
    data, environment = rewards.data_for(config), config.rollout.environment
    if not environment.function:
        return data
    template = str(tokenizer.chat_template)
    of_llama, of_coder = '"parameters"' in template and "<tool_call>" not in template, "<function=" in template
    if environment.function == "tool_loop" and (of_llama or of_coder):  # Llama 3.1, Qwen3-Coder
        raise UserError(
            "the model's chat template asks for tool calls of another form than tool_loop reads",
            where="config: rollout.environment",
            fix="use a model with Qwen3's form of calls, or write your own environment (docs/environments.md)",
        )
    options = dict(data.chat_template_options)
    if environment.tools and data.chat_template:
        options.setdefault("tools", schemas(environment.tools))
    return data.model_copy(update={"keep_columns": True, "chat_template_options": options})
