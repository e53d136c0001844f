"""`oblr-megatron study`: one subcommand per study."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from oblr_megatron.runtime.command_line import Parser

STUDIES = {
    "task": "write a task's model, data and config, to train it on the real stack",
    "curves": "learning curves of arms x seeds with equal samples, each arm at the best rate of its own sweep",
    "variance": "variance of the gradient under every baseline, at a fixed policy",
    "bias": "mean score and gradient under truncated sampling, caps and rejection, by enumeration",
    "scaling": "the planner's time and memory predictions against measured steps on this machine's cores",
}
"""Subcommand -> help text. The module of the same name in this package has `add_arguments(parser)`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    studies = parser.add_subparsers(required=True, metavar="STUDY", parser_class=StudyParser)
    for name, what in STUDIES.items():
        studies.add_parser(name, module=f"{__package__}.{name}", help=what, description=what)


class StudyParser(Parser):
    """A parser that imports its options from a module on first use, so that other studies' imports cost no time.

    Args:
        module: dotted name of the module.
        options: passed to ArgumentParser.
    """

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module: str | None = module

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Add the module's options, then parse."""
        if self._module is not None:
            import_module(self._module).add_arguments(self)
            self._module = None
        return super().parse_known_args(args, namespace)
