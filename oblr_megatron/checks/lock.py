"""Installed packages compared with the pins of a lock (`requirements/*.txt`). Imports no torch."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from oblr_megatron.checks.packages import installed_version
from oblr_megatron.errors import UserError


def differences(path: Path) -> list[str]:
    """One line for each package of a lock that is missing here or has another version, in the lock's order.

    Packages that the lock does not name are not compared. Local versions count as their public one: 2.13.0+cpu is
    2.13.0.

    Raises:
        UserError: the file cannot be read, or a line is not a pin.
    """
    lines = []
    for name, version in pins(path).items():
        installed = installed_version(name)
        if installed is None:
            lines.append(f"{name} {version} is not installed")
        elif Version(installed).public != version.public:
            lines.append(f"{name} {installed} is installed instead of {version}")
    return lines


def pins(path: Path) -> dict[str, Version]:
    """Versions by name, of the lines that are for this Python and platform.

    Raises:
        UserError: the file cannot be read, or a line is not a pin.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the lock cannot be read: {error}", where=str(path), fix="name a file of pins") from error
    versions = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            pin = Requirement(text)
            (only,) = pin.specifier  # exactly one
            version = Version(only.version)
            if only.operator != "==":
                raise InvalidVersion(only.operator)
        except (InvalidRequirement, InvalidVersion, ValueError) as error:
            raise UserError(f"{text!r} is not a pin", where=f"{path}:{number}", fix="write name==version") from error
        if pin.marker is None or pin.marker.evaluate():
            versions[pin.name] = version
    return versions
