"""What is said about a function of the user that cannot be imported: the line of the file, or how to name one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oblr_megatron.errors import UserError
from oblr_megatron.user_functions import forget_edited, import_from_here


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\ndef f(:\n", 2), ("x = 1\n\ny = 1 / 0\n", 3), ("import no_such_package_here\n", 1)]
)
def test_the_line_that_fails_is_named(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        import_from_here(f"{path}:f", "the reward", "reward.name")
    assert caught.value.fix == f"correct {path}, line {line}"


@pytest.mark.parametrize("name", ["nowhere:f", "nowhere.py:f", "json:nothing"])
def test_a_name_of_nothing_asks_for_a_name(name: str) -> None:
    with pytest.raises(UserError, match='Fix: give "package'):
        import_from_here(name, "the reward", "reward.name")


def test_a_mistake_that_names_its_fix_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "declares.py"
    path.write_text("from oblr_megatron.errors import UserError\nraise UserError('wrong', fix='put it right')\n")
    with pytest.raises(UserError) as caught:
        import_from_here(f"{path}:f", "the baseline", "algo.baseline")
    assert (caught.value.what, caught.value.fix) == ("wrong", "put it right")


@pytest.mark.parametrize("name", ["edited_in_a_notebook", "not-an-identifier"])
def test_an_edited_file_is_loaded_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.py"
    for number, text in enumerate(("def f(): return 1\n", "def f(): return 2\n\ndef g(): return 3\n")):
        path.write_text(text)
        os.utime(path, ns=(number, number))
        if number:
            assert import_from_here(f"{path}:f", "the reward", "reward.name")() == 1, "a run goes on with its functions"
        forget_edited()
        assert import_from_here(f"{path}:f", "the reward", "reward.name")() == number + 1
    assert import_from_here(f"{path}:g", "the reward", "reward.name")() == 3
