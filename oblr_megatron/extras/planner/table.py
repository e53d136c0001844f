"""The result of a search as a table, as JSON and as sections of a config file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from oblr_megatron.formatting import number

if TYPE_CHECKING:
    from oblr_megatron.extras.planner.search import Plan, SearchResult
    from oblr_megatron.extras.planner.setting import Request

PHASES = ("rollout", "norms", "gradient", "optimizer", "push")
COMMENT = """# Written by `oblr-megatron plan`: {name}
# predicted {seconds:.1f} s a step on {machines}, {peak:.1f} GB a GPU; docs/planner.md lists what that leaves out
"""


def table(plans: Sequence[Plan], request: Request) -> Table:
    """One row per plan."""
    sequence = request.config({})
    title = (
        f"{request.model} on {_machines(request)}, {sequence.num_prompts} x {sequence.group_size} samples: prompts of "
        f"{sequence.data.max_prompt_tokens} tokens, responses of {request.mean_response_tokens} (mean)"
    )
    layouts = Table("#", "layout", title=title)
    for name in ("step s", *PHASES, "GB", "tokens/s/GPU", "MFU"):
        layouts.add_column(name, justify="right", no_wrap=True)
    layouts.add_column("bound by")
    for rank, plan in enumerate(plans, 1):
        cost = plan.prediction
        seconds = [number(cost.seconds), *(number(cost.phases[name].seconds) for name in PHASES)]
        metrics = [f"{plan.peak_bytes / 1e9:.0f}", number(cost.tokens_per_s), f"{cost.mfu:.0%}"]
        layouts.add_row(str(rank), plan.name, *seconds, *metrics, cost.bound_by)
    return layouts


def _machines(request: Request) -> str:
    """Example: "48 x h100, engines on 16 more"."""
    engines = f", engines on {request.engine_gpus} more" if request.engine_gpus else ""
    return f"{request.gpus} x {request.machine.device.name}{engines}"


def summary(result: SearchResult) -> str:
    """Numbers of layouts that fit, are too large, or are refused."""
    return f"{len(result.plans)} layouts fit; {result.too_large} are too large, {result.refused} are refused"


def as_json(plans: Sequence[Plan], result: SearchResult, request: Request) -> str:
    """The plans as one line of JSON."""
    record = {
        "model": request.model,
        "gpus": request.gpus,
        "engine_gpus": request.engine_gpus,
        "device": request.machine.device.name,
        "fit": len(result.plans),
        "too_large": result.too_large,
        "refused": result.refused,
        "plans": [plan_record(plan) for plan in plans],
    }
    return json.dumps(record)


def plan_record(plan: Plan) -> dict[str, Any]:
    """One plan, with the seconds of each term."""
    cost = plan.prediction
    return {
        "layout": plan.name,
        "step_s": cost.seconds,
        "hidden_s": cost.hidden,
        "phases": {name: {"s": phase.seconds, **phase.terms} for name, phase in cost.phases.items()},
        "training_bytes": plan.training_bytes,
        "rollout_bytes": plan.rollout_bytes,
        "memory": dict(plan.memory.rows()),
        "tokens_per_s_per_gpu": cost.tokens_per_s,
        "mfu": cost.mfu,
        "bound_by": cost.bound_by,
        "sections": plan.sections,
    }


def write_toml(plan: Plan, request: Request, path: Path) -> None:
    """Write the plan's sections for a config file."""
    head = COMMENT.format(
        name=plan.name,
        seconds=plan.prediction.seconds,
        machines=_machines(request),
        peak=plan.peak_bytes / 1e9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:  # plan_command.py has refused an existing file
        file.write(head + unset(plan.sections, request.table) + toml(plan.sections))


def unset(sections: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """A comment for each setting of None, which TOML cannot state, if the config `before` has another value."""
    names = [
        f"{name}.{key}"
        for name, fields in sections.items()
        for key, value in fields.items()
        if value is None and before.get(name, {}).get(key) is not None
    ]
    return "".join(f"# Remove {name} from your config.\n" for name in names)


def toml(sections: Mapping[str, Any], prefix: str = "") -> str:
    """Nested tables of numbers, strings and truth values as TOML; the JSON of these values is valid TOML.

    Settings of None, as in the config.json of a run, are left out: TOML has no such value.
    """
    text = ""
    for name, fields in sections.items():
        plain = {key: value for key, value in fields.items() if not (value is None or isinstance(value, Mapping))}
        nested = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
        if plain:
            lines = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in plain.items())
            text += f"\n[{prefix}{name}]\n{lines}"
        text += toml(nested, f"{prefix}{name}.")
    return text
