"""A run uses the servers with fitting settings, and asks for them before it starts and before each push.

The servers' answers are made up.

Not covered: real servers (tests/e2e/test_servers.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.transformers_utils.config import try_get_generation_config

from oblr_megatron.config import Config
from oblr_megatron.engine.http_messages import PROTOCOL, Holding, Info
from oblr_megatron.engine.identity import ModelIdentity
from oblr_megatron.engine.plugin import SERVER_SHM_BACKEND
from oblr_megatron.engine.protocol import API_KEY
from oblr_megatron.errors import EngineLostError, EnginesGoneError, UserError
from oblr_megatron.rollout.server_checks import check_servers, misfits
from oblr_megatron.rollout.server_client import ServerLostError, VllmServer
from oblr_megatron.rollout.servers import _Servers
from tests.tiny import make_hf_dir
from tests.unit.configs import config_with

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.fixture
def path(tiny_hf: Path) -> Path:
    return tiny_hf


def run(path: Path, urls: list[str] = URLS, only: bool = False, **model: Any) -> Config:
    return config_with(model={"path": str(path)} | model, rollout={"servers": urls, "only": only})


def info_of(path: Path, **changes: Any) -> Info:
    """What a server of this model says of itself."""
    settings: dict[str, Any] = {
        "protocol": PROTOCOL,
        "instance": "a",
        "model": str(path),
        **asdict(ModelIdentity.of(path)),
        "dtype": "float32",
        "max_model_len": 10**6,
        "max_num_seqs": 8,
        "workers": 1,
        "transfer": SERVER_SHM_BACKEND,
        "holding": Holding(),
        "unusable": None,
        "generated": 0,
        "cached": 0,
    }
    return Info(**settings | changes)


class Answers:
    """The answers of all servers, by URL; an event is waited for first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Info | Exception | asyncio.Event]) -> None:
        self.now = answers

        async def info(server: VllmServer, _: float) -> Info:
            answer = self.now[server.url]
            if isinstance(answer, asyncio.Event):
                await answer.wait()
                answer = self.now[server.url]
            if not isinstance(answer, Info):
                assert isinstance(answer, Exception)
                raise answer
            return answer

        monkeypatch.setattr(VllmServer, "info", info)


@pytest.mark.parametrize("wide", [False, True])
def test_a_server_with_other_logits_is_refused(wide: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, {URLS[0]: info_of(path, dtype="bfloat16", widens_logits=wide)})
    agreed, other = ("float32", "model") if wide else ("model", "float32")
    check_servers(run(path, URLS[:1], dtype="bfloat16", head_dtype=agreed))
    with pytest.raises(UserError, match=f"--head-dtype {other}") as error:
        check_servers(run(path, URLS[:1], dtype="bfloat16", head_dtype=other))
    assert error.value.where == "config: rollout.servers"


def edited(path: Path, to: Path, name: str, **values: Any) -> Path:
    """A copy of a model's directory, with other values in one of its JSON files."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    table = json.loads((to / name).read_text()) | values
    (to / name).write_text(json.dumps(table))
    return to


@pytest.mark.parametrize(
    ("trait", "file", "values"),
    [
        ("rope_theta", "config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000}}),
        ("rms_norm_eps", "config.json", {"rms_norm_eps": 1e-5}),
        ("stop_tokens", "generation_config.json", {"eos_token_id": [1, 5]}),
        ("stop_tokens", "tokenizer_config.json", {"eos_token": "t5"}),
    ],
)
def test_a_sibling_with_equal_shapes_is_refused(
    trait: str, file: str, values: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    sibling = edited(path, tmp_path / "sibling", file, **values)
    found, own = ModelIdentity.of(sibling), ModelIdentity.of(path)
    assert (found.shapes, found.fingerprint) == (own.shapes, own.fingerprint)
    (what, fix), *_ = misfits(info_of(sibling), run(path), own)
    assert f"{sibling} with {trait} {found.traits[trait]}, but {path} has" in what and fix.endswith(f"--model {path}")
    assert not list(misfits(info_of(sibling), run(sibling), found))


def test_stop_tokens_are_vllms(path: Path, tmp_path: Path) -> None:
    several = edited(path, tmp_path / "several", "generation_config.json", eos_token_id=[5, 7])
    bare = edited(path, tmp_path / "bare", "config.json", eos_token_id=9)
    (bare / "generation_config.json").unlink()
    for one in (path, several, bare):
        parameters, generation = SamplingParams(), try_get_generation_config(str(one), trust_remote_code=False)
        assert generation is not None
        parameters.update_from_generation_config(generation.to_diff_dict(), 1)  # the tokenizer's
        assert ModelIdentity.of(one).traits["stop_tokens"] == sorted(parameters.all_stop_token_ids)


def test_a_run_without_pushes_needs_the_same_weights(path: Path, tmp_path: Path) -> None:
    other = make_hf_dir(tmp_path / "other", seed=1)
    own = ModelIdentity.of(path)
    assert not list(misfits(info_of(other), run(path), own)), "pushes replace them"
    ((what, _),) = misfits(info_of(other), run(path, only=True), own)
    assert what == f"serves {other}, and its weights differ from those of {path}"


def test_a_run_without_pushes_refuses_a_server_whose_push_broke_off(path: Path) -> None:
    broken = info_of(path, unusable="push 0 failed: the trainer broke off")
    own = ModelIdentity.of(path)
    assert not list(misfits(broken, run(path), own)), "the next push repairs it"
    ((what, fix),) = misfits(broken, run(path, only=True), own)
    assert "push 0 failed" in what and fix == "start it again"


def test_a_key_that_no_header_can_hold_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "0123456789abcdef\n")
    with pytest.raises(UserError, match="printable ASCII") as error:
        check_servers(run(path))
    assert error.value.where == API_KEY


@pytest.fixture
def servers(path: Path) -> Iterator[_Servers]:
    made = _Servers(run(path))
    yield made
    made.close()


def lose(server: VllmServer) -> None:
    server.lose(f"{server.name} was lost")


def test_the_models_directory_is_not_read_while_servers_are_asked(
    servers: _Servers, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow storage would stop the other questions."""
    Answers(monkeypatch, dict.fromkeys(URLS, info_of(path)))
    monkeypatch.setattr(ModelIdentity, "of", lambda path: pytest.fail(f"read {path}"))
    assert servers.loop.run(servers.wait_for_any(60)) == 0 and servers.present() == servers.servers


@pytest.mark.parametrize(
    "changes", [{"max_model_len": 10}, {"vllm": {"kv_cache_dtype": "fp8"}}, {"quantization": "fp8_per_tensor"}]
)
def test_a_server_that_comes_back_with_other_settings_is_not_used(
    changes: dict[str, Any], servers: _Servers, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = info_of(path), info_of(path, **changes)
    answers = Answers(monkeypatch, dict.fromkeys(URLS, good))
    one, two = servers.servers
    assert servers.loop.run(servers.wait_for_any(60)) == 0 and servers.present() == [one, two]
    lose(one)
    answers.now[one.url] = bad
    assert servers.loop.run(servers.wait_for_any(60)) == 0 and servers.present() == [two]
    assert one.unfit and one.lost is not None and one.lost.startswith(one.name) and "start it with" in one.lost
    answers.now[one.url] = good
    assert servers.loop.run(servers.wait_for_any(60)) == 1 and servers.present() == [one, two]
    answers.now |= dict.fromkeys(URLS, bad)  # started again so fast that nobody has missed them
    with pytest.raises(EnginesGoneError, match=r"no server can be used: .*start it with"):
        servers.loop.run(servers.wait_for_any(60))


def test_a_preempted_run_waits_for_no_server(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers got the signal, too. One that is there is used as before."""
    answers = Answers(monkeypatch, dict.fromkeys(URLS, EngineLostError("refused")))
    servers = _Servers(run(path), terminated=lambda: True)
    with pytest.raises(EnginesGoneError, match=r"SIGTERM, and no server is there: .*refused"):
        servers.loop.run(servers.wait_for_any(60))
    answers.now[URLS[0]] = info_of(path)
    assert servers.loop.run(servers.wait_for_any(60)) == 0 and len(servers.present()) == 1
    servers.close()


def test_a_host_that_is_down_holds_up_no_push_and_its_answer_counts_at_the_next_one(
    servers: _Servers, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers.servers
    down = asyncio.Event()
    answers = Answers(monkeypatch, {one.url: down, two.url: info_of(path)})
    monkeypatch.setattr("oblr_megatron.rollout.servers.LOST_SECONDS", 0.01)
    servers._known.add(one)
    lose(one)

    async def ask() -> int:
        async with asyncio.timeout(30):
            return await servers.wait_for_any(60)

    for _ in range(2):
        assert servers.loop.run(ask()) == 0 and servers.present() == [two]
    answers.now[one.url] = info_of(path)

    async def answer(event: asyncio.Event) -> None:
        event.set()
        await asyncio.wait(servers._open.values())

    servers.loop.run(answer(down))
    assert one.lost is not None, "no weights have come"
    slow = asyncio.Event()
    answers.now[one.url] = slow
    asked = servers.loop.submit(ask())  # this time it is waited for
    with pytest.raises(TimeoutError):
        asked.result(0.3)
    answers.now[one.url] = info_of(path)
    servers.loop._loop.call_soon_threadsafe(slow.set)
    assert asked.result(30) == 1 and servers.present() == [one, two]
    answers.now[two.url] = ServerLostError("gone")
    assert servers.loop.run(ask()) == 0 and servers.present() == [one]
