"""The parser of all commands: a mistake is a `UserError`, so it ends in one line. Imports no torch."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from oblr_megatron.errors import UserError

LARGEST = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without the usage text in front of an error; its subcommands are such parsers, too."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always.
        """
        raise UserError(message, where="command line", fix=f"see `{self.prog} --help`")


def count(text: str) -> int:
    """An option's type: a whole number of 1 or more.

    >>> count("8")
    8
    """
    return whole(text, 1, LARGEST)


def whole(text: str, least: int, most: int) -> int:
    """An option's value: a whole number from `least` to `most`, decimal digits only."""
    if not text.isdecimal() or not least <= int(text[:20]) <= most:
        bounds = f"of {least} or more" if most == LARGEST else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
    return int(text)


def port_number(text: str) -> int:
    """An option's type: a port."""
    return whole(text, 1, 2**16 - 1)


def amount(text: str) -> float:
    """An option's type: a number above 0.

    >>> amount("79.5")
    79.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
