"""Which folder may import which, which modules import no torch, and which may import megatron-core and vLLM.

The order of folders is checked in the source of every file, including imports inside functions and for types. What a
module loads is checked in a fresh interpreter, so that indirect imports count. Not covered: `importlib` calls.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import oblr_megatron
from oblr_megatron.extension import EXTENSIONS

PACKAGE = Path(oblr_megatron.__file__).parent
ROOT = PACKAGE.parent

ORDER = (
    *("errors", "user_functions", "extension", "formatting", "types", "timing", "families", "padding", "config"),
    *("checks", "metrics", "runtime", "processes"),
    *("algo", "rewards", "data", "memory", "model", "weights", "norms", "checkpoint", "engine", "environments"),
    *("rollout", "gradient", "observe", "evaluation", "preflight"),
    *("sampling", "opening", "run", "step_loop", "cli", "api"),
    *("extras", "studies"),
)
"""Folders and root modules from the bottom up: each imports only names to its left."""

HEAVY = ("megatron", "vllm")
PURE = (
    "types", "algo", "rewards", "data", "config", "errors", "model/sq_norms.py",
    "norms/oracle.py", "norms/products.py", "norms/segments.py",
)  # fmt: skip
CLAIM = re.compile(r"(?i)\bimports? no (torch|vllm)\b")
TORCH_FREE = ("torch", "transformers", "sympy", *HEAVY)


def sources() -> dict[str, Path]:
    """Every module of the package and the studies by its dotted name."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "studies").rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = sources()


def room(module: str) -> str:
    """The folder or root module of a name. Example: "oblr_megatron.algo.snr" -> "algo"."""
    first, *rest = module.split(".")
    return rest[0] if first == "oblr_megatron" and rest else first


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path, *, types_too: bool = True) -> tuple[str, ...]:
    """Our modules that a file imports, anywhere in it."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too:
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module or ""
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return tuple(name for name in walk(parsed(path)) if name in MODULES)


def modules(part: str) -> list[str]:
    """Names of all modules of a part: one module, or a package with all its modules."""
    path = PACKAGE / part
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]
    assert files and all(file.is_file() for file in files), f"{part} is not there"
    return [name for name, file in MODULES.items() if file in files]


def loaded_by(names: list[str], watched: tuple[str, ...]) -> list[str]:
    """The watched top-level packages that are loaded by importing the modules."""
    script = f"import json, sys, {', '.join(names)}; print(json.dumps([w for w in {watched!r} if w in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return list(json.loads(result.stdout.splitlines()[-1]))


def test_no_import_runs_upward() -> None:
    rank = {name: position for position, name in enumerate(ORDER)}
    upward = [
        f"{name} imports {target}"
        for name, path in MODULES.items()
        if name != "oblr_megatron"
        for target in imported(path)
        if target != "oblr_megatron" and rank[room(target)] > rank[room(name)]
    ]
    assert upward == []
    assert {room(name) for name in MODULES} - {"oblr_megatron"} == set(ORDER)


def test_the_package_names_its_extras_only_in_the_registry() -> None:
    assert {room(value) for value in EXTENSIONS.values()} == {"extras", "studies"}
    assert {value.partition(":")[0] for value in EXTENSIONS.values()} <= MODULES.keys()
    naming = {
        name
        for name, path in MODULES.items()
        if room(name) not in ("extras", "studies", "extension") and named_in("oblr_megatron.extras", path)
    }
    assert naming == set()


def test_the_verifier_imports_nothing_of_the_rewards_above_it() -> None:
    inner = "oblr_megatron.rewards.verifier"
    found = {target for name, path in MODULES.items() if name.startswith(inner) for target in imported(path)}
    assert [target for target in found if room(target) == "rewards" and not target.startswith(inner)] == []


def test_no_modules_import_each_other() -> None:
    graph = {name: set(imported(path, types_too=False)) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@cache
def names_in(path: Path) -> set[str]:
    """The names that a file defines or imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_examples_and_tools_import_names_that_exist() -> None:
    """Some of them run nightly only, or on GPUs."""
    missing = []
    folders = [ROOT / name for name in ("examples", "tools", "studies")]  # and one below: studies may write deeper ones
    for path in (file for folder in folders for pattern in ("*.py", "*/*.py") for file in folder.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "oblr_megatron":
                assert node.module is not None
                known = names_in(MODULES[node.module]) if node.module in MODULES else set()
                wanted = {alias.name for alias in node.names} - known
                missing += [
                    f"{path}: {node.module}.{name}" for name in wanted if f"{node.module}.{name}" not in MODULES
                ]
    assert missing == []


def test_the_pure_half_imports_neither_megatron_nor_vllm() -> None:
    names = [name for part in PURE for name in modules(part)]
    assert len(names) > 25
    assert loaded_by(names, HEAVY) == []


def claims(what: str) -> list[str]:
    """Modules that say "Imports no torch" (or vllm) in their docstring or in that of their folder."""
    found = set()
    for name, path in MODULES.items():
        text = " ".join((ast.get_docstring(parsed(path)) or "").split())
        if what in [match.lower() for match in CLAIM.findall(text)]:
            folder = f"{name}." if path.stem == "__init__" else name
            found |= {other for other in MODULES if other == name or other.startswith(folder)}
    return sorted(found)


def test_modules_that_claim_to_import_no_torch_import_none() -> None:
    names = claims("torch")
    assert len(names) > 40
    guilty = [name for name in names if loaded_by([name], TORCH_FREE)] if loaded_by(names, TORCH_FREE) else []
    assert guilty == []


def test_modules_that_claim_to_import_no_vllm_import_none() -> None:
    names = claims("vllm")
    assert names
    assert loaded_by(names, ("vllm",)) == []


def test_one_module_imports_megatrons_parallel_state() -> None:
    using = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if named_in("parallel_state", path)}
    assert using == {"model/parallel.py"}


def named_in(name: str, path: Path) -> bool:
    """Whether a file's code names it. Its text is asked first, because `code` is slow."""
    return name in path.read_text(encoding="utf-8") and name in code(path)


def code(path: Path) -> str:
    """A file without its comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.Constant("")
    return ast.unparse(tree)


@pytest.mark.parametrize("part", ["algo", "rewards", "data", "config", "types"])
def test_no_pure_module_imports_them_inside_a_function_either(part: str) -> None:
    for name in modules(part):
        text = code(MODULES[name])
        assert not re.search(r"^\s*(from|import) (megatron|vllm)\b", text, re.MULTILINE), name
