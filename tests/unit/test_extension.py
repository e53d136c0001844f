"""Optional parts whose folder is missing: one line says what, where and how to fix it, and all else works."""

from __future__ import annotations

from pathlib import Path

import pytest

from oblr_megatron import extension
from oblr_megatron.checks.vllm_options import check_speculation
from oblr_megatron.cli import main
from oblr_megatron.config import RewardConfig
from oblr_megatron.config.data import SourceConfig
from oblr_megatron.data.sources import kind_of
from oblr_megatron.errors import EXIT_USER, UserError
from oblr_megatron.observe.trackers.registry import check_trackers
from oblr_megatron.rewards.registry import check_reward

USES = {
    "log.trackers mlflow": lambda: check_trackers(["mlflow"]),
    "log.trackers trackio": lambda: check_trackers(["trackio"]),
    "reward reasoning_gym": lambda: check_reward(RewardConfig(name="reasoning_gym"), max_response_tokens=16),
    "data reasoning_gym": lambda: kind_of(SourceConfig(path="reasoning_gym:gcd")),
    "rollout.speculation": lambda: check_speculation("ngram", "config: rollout.speculation"),
}


@pytest.fixture
def without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `extras/` and `studies/` were deleted."""
    absent = {name: place.replace("extras", "absent").replace("studies", "absent") for name, place in PLACES.items()}
    monkeypatch.setattr(extension, "EXTENSIONS", absent)


PLACES = dict(extension.EXTENSIONS)


@pytest.mark.usefixtures("without_folders")
@pytest.mark.parametrize("name", USES)
def test_a_missing_folder_is_one_line(name: str) -> None:
    with pytest.raises(UserError) as caught:
        USES[name]()
    assert caught.value.where == name and "absent" in caught.value.what and caught.value.fix


@pytest.mark.usefixtures("without_folders")
@pytest.mark.parametrize("arguments", [["plan", "--gpus", "8"], ["quantize", "model", "fp8"], ["study", "variance"]])
def test_a_command_of_a_missing_folder_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_USER
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and f"oblr-megatron {arguments[0]}" in said


@pytest.mark.usefixtures("without_folders")
def test_other_commands_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == EXIT_USER
    assert str(tmp_path) in capsys.readouterr().err
    check_trackers(["tensorboard"])
    check_speculation("none", "config: rollout.speculation")


def test_a_package_that_a_part_needs_is_named_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needing.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extension, "EXTENSIONS", {"part": "needing:thing"})
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        extension.extension("part")
