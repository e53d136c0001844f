"""The optional parts of the package by name, each imported when it is first used. Imports no torch.

    add_arguments = extension("oblr-megatron plan")

`oblr_megatron/extras/` and `studies/` may be deleted: nothing else imports them, and all else runs without them.
`studies/` is not installed. It is found next to the package, in a clone, or in the current directory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oblr_megatron.errors import UserError

EXTENSIONS = {
    "oblr-megatron plan": "oblr_megatron.extras.planner.plan_command:add_arguments",
    "oblr-megatron quantize": "oblr_megatron.extras.quantize.quantize_command:add_arguments",
    "oblr-megatron study": "studies.study_command:add_arguments",
    "model.batch_invariant": "oblr_megatron.extras.exact_sums.checks:check_invariant",
    "model.batch_invariant trainer": "oblr_megatron.extras.exact_sums.trainer:numerics_of",
    "model.batch_invariant engine": "oblr_megatron.extras.exact_sums.engine:install",
    "rollout.speculation": "oblr_megatron.extras.speculation.options",
    "rollout.speculation draws": "oblr_megatron.extras.speculation.draws:install",
    "data reasoning_gym": "oblr_megatron.extras.gym.rows",
    "reward reasoning_gym": "oblr_megatron.extras.gym.reward",
    "log.trackers mlflow": "oblr_megatron.extras.mlflow:MlflowTracker",
    "log.trackers trackio": "oblr_megatron.extras.trackio:TrackioTracker",
}
"""A user's option -> the module, or "module:attribute", that provides it."""


def available(name: str) -> bool:
    """Whether an optional part is there; does not import it."""
    module = EXTENSIONS[name].partition(":")[0]
    if module.startswith("studies."):
        _reach_studies()
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


def check_extension(name: str) -> None:
    """Check that an optional part is there, without importing it.

    Raises:
        UserError: its folder is missing.
    """
    if not available(name):
        module = EXTENSIONS[name].partition(":")[0]
        studies = module.startswith("studies.")
        what = "the studies live in the repository" if studies else f"{module} is not in this installation"
        raise UserError(what, where=name, fix="run it from a complete clone of the repository")


def _reach_studies() -> None:
    roots = (Path(__file__).resolve().parents[1], Path())
    clone = next((str(root.absolute()) for root in roots if (root / "studies" / "study_command.py").is_file()), None)
    if clone is not None and clone not in sys.path:
        sys.path.append(clone)


def extension(name: str) -> Any:
    """Import an optional part. Example: extension("log.trackers mlflow") is the class MlflowTracker.

    Raises:
        UserError: its folder is missing.
    """
    check_extension(name)
    module, _, attribute = EXTENSIONS[name].partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported
