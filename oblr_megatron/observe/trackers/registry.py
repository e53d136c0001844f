"""The trackers by name, and the check before a run starts.

A package adds a tracker with an entry point in the group GROUP. It names a subclass of `base.Tracker`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

from oblr_megatron.errors import UserError
from oblr_megatron.extension import EXTENSIONS, check_extension, extension
from oblr_megatron.observe.trackers.base import TrackedRun, Tracker

GROUP = "oblr_megatron.trackers"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""A name is also that of a module here or in `extras`, of the package that the tracker needs, and of the pip extra."""


def check_trackers(names: Sequence[str]) -> None:
    """Check `log.trackers` before the run starts; imports no tracker.

    Raises:
        UserError: a name is listed twice or unknown, or its module or package is not installed.
    """
    where, others = "config: log.trackers", entry_points(group=GROUP).names
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UserError(f"the tracker {name!r} is listed twice", where=where, fix="list it once")
        if name not in TRACKERS and name not in others:
            known = ", ".join(sorted({*TRACKERS, *others}))
            raise UserError(f"there is no tracker {name!r}", where=where, fix=f"use one of {known}")
        if f"log.trackers {name}" in EXTENSIONS:
            check_extension(f"log.trackers {name}")
        if name in TRACKERS and find_spec(name) is None:
            raise UserError(
                f"the tracker {name!r} needs the package {name}, which is not installed",
                where=where,
                fix=f"call pip install -e '.[{name}]' in the repository, or leave the tracker out",
            )


def open_tracker(run: TrackedRun) -> Tracker:
    """Import and open a tracker; called in its own process.

    Raises:
        Exception: whatever its package raises.
    """
    if (name := f"log.trackers {run.tracker}") in EXTENSIONS:
        factory: Callable[[TrackedRun], Tracker] = extension(name)
    elif run.tracker in TRACKERS:
        module = importlib.import_module(f"oblr_megatron.observe.trackers.{run.tracker}")
        factory = getattr(module, f"{run.tracker.title()}Tracker")
    else:
        factory = entry_points(group=GROUP)[run.tracker].load()
    return factory(run)
