"""Functions of the user by name: rewards, environments, tools and baselines. Imports no torch.

"package.module:function" or "path/to/file.py:function", importable from the current directory
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from oblr_megatron.errors import UserError


def import_from_here(name: str, what: str, where: str) -> Callable[..., Any]:
    """Import "package.module:function", also from the current directory.

    Raises:
        UserError: it cannot be imported, or is not callable.
    """
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        function: Callable[..., Any] = resolve(name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or be a script that exits
        raise UserError(
            f"{what} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            fix='give "package.module:function", importable from the current directory',
        ) from error
    if not callable(function):
        raise UserError(f"{what} is not callable", where=where, fix="name a function")
    return function


def resolve(target: str) -> Any:
    """Import the object named "package.module:function" or "path/to/file.py:function".

    Raises:
        ImportError, AttributeError, OSError: it does not exist.
    """
    module, _, name = target.partition(":")
    imported: Any = _from_file(Path(module).resolve()) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        imported = getattr(imported, part)
    return imported


def _from_file(path: Path) -> ModuleType:
    """The module of a file, loaded once."""
    name = str(path)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a name that ends with .py has a loader"
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:  # half a module must not stay; the user's code may raise anything
            del sys.modules[name]
            raise
    return sys.modules[name]
