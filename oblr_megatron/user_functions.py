"""Functions of the user by name: rewards, environments, tools and baselines. Imports no torch.

"package.module:function", importable from the current directory, or "path/to/file.py:function", which may import
modules of its directory.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from oblr_megatron.errors import UserError


def import_from_here(name: str, what: str, where: str) -> Callable[..., Any]:
    """Import "package.module:function", also from the current directory.

    Raises:
        UserError: it cannot be imported, or is not callable.
    """
    if "" not in sys.path:
        _append_path(Path.cwd())
    try:
        function: Callable[..., Any] = resolve(name)
    except BaseException as error:  # the user's module may raise anything, or be a script that exits
        if isinstance(error, (KeyboardInterrupt, UserError)):
            raise
        named = 'give "package.module:function", importable from the current directory, or "path/to/file.py:function"'
        raise UserError(
            f"{what} cannot be imported: {type(error).__name__}: {error}", where=where, fix=_place_of(error) or named
        ) from error
    if not callable(function):
        raise UserError(f"{what} is not callable", where=where, fix="name a function")
    return function


def _place_of(error: BaseException) -> str:
    """A fix that names the line of the user's module where the import failed; "" if no module was found."""
    if isinstance(error, SyntaxError):
        return f"correct {error.filename}, line {error.lineno}"
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    users = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    return f"correct {users[-1].filename}, line {users[-1].lineno}" if users else ""


def absolute(target: str) -> str:
    """The same function, also from another directory.

    >>> absolute("/tools/search.py:find"), absolute("package.module:function")
    ('/tools/search.py:find', 'package.module:function')
    """
    module, _, name = target.rpartition(":")
    return f"{Path(module).absolute()}:{name}" if module.endswith(".py") else target


def resolve(target: str) -> Any:
    """Import the object named "package.module:function" or "path/to/file.py:function".

    Raises:
        ImportError, AttributeError, OSError: it does not exist.
    """
    module, _, name = target.partition(":")
    imported: Any = _from_file(Path(module).resolve()) if module.endswith(".py") else importlib.import_module(module)
    if imported.__name__ not in _LOADED and imported.__name__ != "__main__":
        _LOADED[imported.__name__] = _written_at(imported)
    for part in name.split("."):
        imported = getattr(imported, part)
    return imported


_LOADED: dict[str, int] = {}  # module -> modification time of its file at the import, ns


def _written_at(module: ModuleType | None) -> int:
    file = Path(getattr(module, "__file__", None) or "")
    return file.stat().st_mtime_ns if file.is_file() else 0


def forget_edited() -> None:
    """Drop modules whose files have changed. The next use imports them again, with a notebook's edits.

    Only the reading of a config calls this: the functions of a run must not change while it runs.
    """
    for name, written in list(_LOADED.items()):
        if _written_at(sys.modules.get(name)) != written:
            del _LOADED[name]
            sys.modules.pop(name, None)


def _append_path(directory: Path) -> None:
    """Last in the path, so that a user's file hides no other module."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _from_file(path: Path) -> ModuleType:
    """The module of a file, loaded once.

    It has the file's name, so that child processes can import what they unpickle. If another module has that name, it
    gets one of its own, which only forked processes know.
    """
    _append_path(path.parent)
    try:
        spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    except ValueError:  # a module of this name was loaded without a spec, such as __main__
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return importlib.import_module(path.stem)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}".replace(".", "_")
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
