"""The examples of docs/rewards.md run unchanged. Not covered: format patterns (test_combined.py)."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from oblr_megatron.config import RewardConfig
from oblr_megatron.rewards.base import RewardResult
from oblr_megatron.rewards.registry import build_reward, check_reward
from tests.ports import free_port
from tests.unit.rewards.conftest import batch

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
FENCED = re.compile(r"^```(python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCED.findall(PAGE.read_text(encoding="utf-8"))
MODULES = [text for kind, text in BLOCKS if kind == "python"]
CONFIGS = [RewardConfig.model_validate(tomllib.loads(text)["reward"]) for kind, text in BLOCKS if kind == "toml"]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The modules of the page as importable files."""
    monkeypatch.syspath_prepend(tmp_path)
    for text in MODULES:
        named = re.match(r"# (\w+\.py)\n", text)
        assert named is not None, text
        (tmp_path / named.group(1)).write_text(text, encoding="utf-8")
    return tmp_path


def by_name(name: str) -> RewardConfig:
    return next(config for config in CONFIGS if config.name == name)


def score(config: RewardConfig) -> RewardResult:
    with build_reward(config, max_response_tokens=1024) as reward:
        return reward.score(*batch([("4", ["it is 4", "it is 5", "four"]), ("7", ["7", "so: 7", "8 "])]))


def test_functions() -> None:
    assert score(by_name("number_rewards:near")).rewards == [1, 0.5, 0, 1, 1, 0.5]
    assert score(RewardConfig(name="verl_rewards:score")).rewards == [0, 0, 0, 1, 0, 0]
    assert score(by_name("group_rewards:shortest")).rewards == [0, 0, 1, 1, 0, 0]
    assert score(by_name("async_rewards:opinion")).rewards == [1, 0, 0, 1, 1, 0]


def test_the_service(modules: Path) -> None:
    port = free_port()
    [script] = modules.glob("*_service.py")
    service = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        config = by_name("http://127.0.0.1:8900/").model_copy(update={"name": f"http://127.0.0.1:{port}/"})
        assert score(config).rewards == [1, 0, 0, 1, 1, 0]
    finally:
        service.kill()
        service.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the service does not listen")


def test_every_other_configuration_is_valid() -> None:
    checked = [config for config in CONFIGS if not config.name.startswith("http")]
    for config in checked:
        check_reward(config, max_response_tokens=1024)
    assert len(checked) == len(CONFIGS) - 1 == 6
