"""`oblr-megatron study`: one subcommand a study."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any

STUDIES = {
    "task": "a task of the study for the real stack, with a config to train it",
    "curves": "arms x seeds with equal samples, each at the best rate of its sweep",
    "variance": "the gradient's covariance under every baseline, at a fixed policy",
    "smoothness": "the score's local Lipschitz constant along a training path",
    "kl": "what a KL penalty does to the optimal baseline, the noise and the rate",
    "learning_rate": "the rate the bound predicts, and the best one of a line search",
    "scaling": "the planner's time and memory of layouts on this machine's cores, against measured steps",
}
"""Name of the module here, which has `add_arguments(parser)`, and of its subcommand; what it measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands."""
    studies = parser.add_subparsers(required=True, metavar="STUDY", parser_class=StudyParser)
    for name, what in STUDIES.items():
        studies.add_parser(name, module=f"{__package__}.{name}", help=what, description=what)


class StudyParser(argparse.ArgumentParser):
    """A parser that learns its options from a module when it is used: no other study's imports have to be waited for.

    Args:
        module: its name.
        options: argparse's.
    """

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module: str | None = module

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """argparse's, of the options the module has."""
        if self._module is not None:
            import_module(self._module).add_arguments(self)
            self._module = None
        return super().parse_known_args(args, namespace)
