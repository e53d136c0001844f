"""Who may import what: the pure half of the package stays free of megatron-core and vLLM, and part of it of torch.

Each import runs in a fresh interpreter and looks at what was loaded, so that an import of an import counts. Not
covered: what `importlib` is asked for by name.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import oblr_megatron

PACKAGE = Path(oblr_megatron.__file__).parent

HEAVY = ("megatron", "vllm")
PURE = ["types", "algo", "rewards", "data", "config", "errors", "gradnorm/kernels.py", "gradnorm/reference.py"]
WITHOUT_TORCH = [
    "config",
    "errors",
    "types",
    "evaluation/figures.py",
    "evaluation/items.py",
    "evaluation/answers.py",
    "evaluation/command.py",
    "checks",
    "checkpoint/hf_dir.py",
    "checkpoint/store.py",
    "stopping",
    "data/rows.py",
    "data/prompts.py",
    "performance/flops.py",
    "performance/hardware.py",
]
WITHOUT_TORCH += ["rewards/registry.py", "rewards/pool.py", "rewards/nursery.py"]


def modules(part: str) -> list[str]:
    """Names of all modules of a part: a module, or a package with everything in it."""
    path = PACKAGE / part
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]
    assert files and all(file.is_file() for file in files), f"{part} is not there"
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def loaded_by(names: list[str], watched: tuple[str, ...]) -> list[str]:
    """Which of the watched top-level packages importing the modules loads."""
    script = f"import json, sys, {', '.join(names)}; print(json.dumps([w for w in {watched!r} if w in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return list(json.loads(result.stdout.splitlines()[-1]))


def test_the_pure_half_imports_neither_megatron_nor_vllm() -> None:
    names = [name for part in PURE for name in modules(part)]
    assert len(names) > 25
    assert loaded_by(names, HEAVY) == []


def test_what_runs_before_any_process_needs_no_torch() -> None:
    names = [name for part in WITHOUT_TORCH for name in modules(part)]
    assert loaded_by(names, ("torch", "transformers", "sympy", *HEAVY)) == []


def imports(path: Path) -> set[str]:
    """Everything a file imports, anywhere in it, as dotted names; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_one_module_imports_megatrons_parallel_state() -> None:
    using = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any("parallel_state" in name for name in imports(path)) or "parallel_state." in code(path)
    }
    assert using == {"model/parallel.py"}


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
        path = PACKAGE.parent / Path(*name.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        found = {imported.split(".")[0] for imported in imports(file)}
        assert found.isdisjoint(HEAVY), file
        assert not any(imported.startswith("oblr_megatron.model") for imported in imports(file)), file
