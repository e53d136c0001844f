"""`rollout.overlap = "stream"` with real vLLM: groups come as they are finished, and are those of a whole batch.

Also: an engine that is killed in the middle, dynamic sampling, two ranks, API servers. Not covered: CUDA, speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oblr_megatron.engine.protocol import BatchInFlight, SamplingRequest
from oblr_megatron.errors import EngineLostError
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.rollout.step_file import read_step, step_path
from oblr_megatron.types import Sample
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.conftest import records
from tests.e2e.forked import forked
from tests.e2e.tiny_rollout import ONE_RANK, engine_processes, make_config, make_prompts, start
from tests.tiny import make_hf_dir

SAME_STEP = ("loss", "gradnorm/sq_mean", "grad_norm", "reward/mean", "entropy", "snr/noise_trace")
PROMPTS, GROUP = 24, 4
REQUEST = SamplingRequest(group_size=GROUP, temperature=1.0, max_tokens=32, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("streamed") / "model", head_dim=32)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[ColocatedEngines]:
    made = start(model, model.parent / "run", max_num_seqs=16, max_restarts=1)
    yield made
    made.close()
    assert not engine_processes()


@pytest.fixture(scope="module")
def whole(engines: ColocatedEngines) -> list[Sample]:
    return engines.generate(make_prompts(PROMPTS), REQUEST)


def drained(batch: BatchInFlight, tokens: float = 1) -> dict[int, list[Sample]]:
    """All groups; each comes once."""
    found: dict[int, list[Sample]] = {}
    while groups := batch.next_groups(tokens):
        assert found.keys().isdisjoint(groups)
        found |= groups
    return found


def same_tokens(groups: dict[int, list[Sample]], whole: list[Sample]) -> float:
    """The share of samples with the tokens of the whole batch: the shape of a batch may change a last bit."""
    pairs = list(zip(flat(groups), whole, strict=True))
    assert all(one.group == other.group and one.prompt_ids == other.prompt_ids for one, other in pairs)
    return sum(one.response_ids == other.response_ids for one, other in pairs) / len(whole)


def flat(groups: dict[int, list[Sample]]) -> list[Sample]:
    return [sample for position in sorted(groups) for sample in groups[position]]


def test_groups_come_as_they_are_finished_and_are_those_of_the_batch(
    engines: ColocatedEngines, whole: list[Sample]
) -> None:
    """Only 16 of 96 sequences run at once, so the first groups come long before the last ones begin."""
    batch = engines.begin(make_prompts(PROMPTS), REQUEST)
    first = batch.next_groups(tokens=1)
    assert 0 < len(first) < PROMPTS
    groups = first | drained(batch)
    assert sorted(groups) == list(range(PROMPTS))
    assert flat(groups) == whole, "one engine, the same requests"
    assert batch.next_groups(tokens=1) == {}


def test_a_killed_engine_is_restarted_and_samples_the_rest(engines: ColocatedEngines) -> None:
    """A batch of seconds, so that the engine is still at work when it is killed."""
    prompts, request = make_prompts(60), replace(REQUEST, group_size=16)
    whole = engines.generate(prompts, request)
    batch = engines.begin(prompts, request)
    first = batch.next_groups(tokens=1)
    assert 0 < len(first) < len(prompts)
    kill(engines)
    rest = drained(batch)
    assert first.keys().isdisjoint(rest), "what had come is not sampled again"
    assert same_tokens(first | rest, whole) > 0.9
    assert engines.metrics()["rollout/restarts"] == 1
    with pytest.raises(EngineLostError):
        batch = engines.begin(prompts, request)
        while batch.next_groups(tokens=1):
            kill(engines)


def kill(engines: ColocatedEngines) -> None:
    assert engines._engine is not None
    engines._engine._process.kill()  # does nothing to a process that was reaped


def test_servers_hand_out_single_prompts(model: Path, whole: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers is killed in the middle; the other one takes its prompts."""
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    servers = [ApiServer(model, model.parent / f"server-{number}.log") for number in range(2)]
    try:
        for server in servers:
            server.wait_ready()
        config = make_config(model, model.parent / "served", servers=[server.url for server in servers])
        served = ServerEngines(config, ONE_RANK)
        served._holder, served._behind = "", False  # the servers hold the checkpoint
        batch = served.begin(make_prompts(PROMPTS), REQUEST)
        first = batch.next_groups(tokens=1)
        servers[0].process.kill()
        groups = first | drained(batch)
        assert same_tokens(groups, whole) > 0.9
        served.close()
    finally:
        for server in servers:
            server.close()


def test_a_streamed_step_is_the_whole_step(tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """The first step of a run on two ranks has the same samples, norms and gradient as one rank's without streaming."""
    common = {"algo__baseline": "optimal", "rollout__max_num_seqs": 8}
    stream = {"rollout__overlap": "stream", "rollout__wave_tokens": 16}
    steps, responses = [], []
    for ranks, more in ((1, {}), (2, stream)):
        run_dir = tmp_path / str(len(steps))
        result = forked(ranks, [*overrides(run_dir, **common, **more), "--save-rollouts"])
        assert result.returncode == 0, result.stderr[-3000:]
        steps += records(run_dir)
        responses.append([one.response_ids for one in read_step(step_path(run_dir / "rollouts", 1)).samples])
    whole, streamed = steps
    assert responses[1] == responses[0]
    assert streamed["rollout/waves"] >= 1  # a trainer on a busy machine finds all responses finished
    assert [streamed[name] for name in SAME_STEP] == pytest.approx([whole[name] for name in SAME_STEP], rel=1e-4)


def test_groups_of_equal_rewards_wait_for_others_to_replace_them(
    tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    """With dynamic sampling a streamed run trains on the groups that a whole batch would keep."""
    dynamic = {"rollout__dynamic_sampling": "true", "group_size": 2, "algo__baseline": "rloo", "num_steps": 1}
    found = []
    for name, more in (("whole", {}), ("stream", {"rollout__overlap": "stream", "rollout__wave_tokens": 16})):
        result = forked(1, overrides(tmp_path / name, rollout__max_num_seqs=8, **dynamic, **more))
        assert result.returncode == 0, result.stderr[-3000:]
        found.append(records(tmp_path / name)[0])
    whole, streamed = found
    assert whole["groups/dropped"] > 0, "otherwise nothing is shown"
    for name in ("groups/dropped", "groups/unused", "rollout/dynamic_batches", "reward/mean", "loss", "grad_norm"):
        assert streamed[name] == pytest.approx(whole[name], rel=1e-4), name
