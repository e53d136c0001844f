"""A lost engine is replaced, and the samples do not show it: real vLLM, one rank and two.

The reference is the unbroken run: the same samples, log-probs to the last bit. Not covered: whole training runs
(test_soak.py), runs without restarts (test_rollout_failures.py), GPUs.
"""

import os
import signal
import threading
from dataclasses import replace

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oblr_megatron.checkpoint.hf import load_hf_weights
from oblr_megatron.config import ModelConfig
from oblr_megatron.errors import EngineLostError
from oblr_megatron.model.policy import build_policy
from oblr_megatron.rollout import push
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights import shm
from oblr_megatron.weights.export import MegatronWeights
from tests.distributed.launch import layout, run_ranks
from tests.e2e.forked_processes import fork_keeper
from tests.e2e.tiny_rollout import Weights, change, engine_processes, largest_error, make_config, sample, start
from tests.tiny import make_hf_dir

SMALL = {"count": 12, "group_size": 4}
LARGE = {"count": 48, "group_size": 12}  # seconds of sampling, long enough to be killed in
PARITY = 1e-4


class Killing:
    """A source that kills a process in the middle of its first pass."""

    def __init__(self, source, victim):
        self._source, self._victim, self.yielded = source, victim, []

    def metadata(self):
        return self._source.metadata()

    def __iter__(self):
        for index, (name, tensor) in enumerate(self._source):
            if index == 5 and self._victim is not None:
                os.kill(self._victim, signal.SIGKILL)
                self._victim = None
            self.yielded.append(name)
            yield name, tensor


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """(engines that may be restarted once in a row, the transformers model of the same directory, the directory)"""
    path = make_hf_dir(tmp_path_factory.mktemp("recovery") / "model", head_dim=32)
    engines = start(path, path.parent / "run", max_restarts=1)
    yield engines, Qwen3ForCausalLM.from_pretrained(path), path
    engines.close()
    assert not engine_processes()


def test_killed_while_it_generates(rollout):
    """The new engine gets the weights of the last push and draws what the old one would have drawn."""
    engines, model, _ = rollout
    change(model, seed=1)
    engines.push(Weights(model), version=1)
    expected = sample(engines, **LARGE)
    victim = kill_in(engines, seconds=0.3)
    assert sample(engines, **LARGE) == expected
    assert_replaced(engines, victim)
    assert largest_error(model, expected[:32]) < PARITY and {one.version for one in expected} == {1}


@pytest.mark.nightly
def test_killed_while_weights_arrive(rollout, monkeypatch):
    """Killed between two of many buckets; every rank iterates the whole source again for the new engine."""
    engines, model, _ = rollout
    monkeypatch.setattr(push, "BUCKET_BYTES", 4096)
    change(model, seed=2)
    victim = engines._engine.pid
    source = Killing(Weights(model), victim)
    stats = engines.push(source, version=2)
    assert source.yielded == 2 * [meta.name for meta in source.metadata()]
    assert stats.tensors == len(source.metadata()) and engines.version == 2
    assert_replaced(engines, victim)
    assert largest_error(model, sample(engines, **SMALL)) < PARITY


def test_a_bucket_that_is_damaged_once_is_sent_again(rollout, monkeypatch):
    engines, model, _ = rollout
    honest, flipped = shm.SharedBuffer.checksum, []

    def damaged(buffer, start, used):
        checksum = honest(buffer, start, used)
        if not flipped:
            flipped.append(start)
            buffer.bytes[start + used // 2] ^= 1  # one bit, after the trainer has taken the checksum
        return checksum

    monkeypatch.setattr(shm.SharedBuffer, "checksum", damaged)
    change(model, seed=3)
    engines.push(Weights(model), version=3)
    assert flipped and engines.metrics() == {"rollout/restarts": 0}
    assert largest_error(model, sample(engines, **SMALL)) < PARITY


@pytest.mark.nightly
def test_hung_while_idle(rollout):
    """A stopped process does not answer. It is killed at the deadline of the next call, and replaced."""
    engines, _, _ = rollout
    expected = sample(engines, **SMALL)
    victim, handle = engines._engine.pid, engines._engine
    handle.deadlines = replace(handle.deadlines, generate=1.5)  # of the one that hangs; its successor has the config's
    os.kill(victim, signal.SIGSTOP)
    assert sample(engines, **SMALL) == expected
    assert_replaced(engines, victim)


@pytest.mark.nightly
def test_one_loss_too_many(rollout):
    """The engine's model is gone, so the new one cannot start. The error has the number of restarts."""
    engines, _, path = rollout
    path.rename(path.with_name("away"))
    os.kill(engines._engine.pid, signal.SIGKILL)
    with pytest.raises(
        EngineLostError,
        match=r"(?s)engine 0 failed while rank 0 waited for the start: .*1 restarts .*rollout.max_restarts",
    ):
        sample(engines, **SMALL)
    path.with_name("away").rename(path)
    assert engines.metrics() == {"rollout/restarts": 1}
    with pytest.raises(EngineLostError, match="engine 0"):
        sample(engines, **SMALL)
    assert not engine_processes()


def kill_in(engines, seconds):
    """Kill the engine while the caller continues; returns its process id."""
    victim = engines._engine.pid
    threading.Timer(seconds, os.kill, (victim, signal.SIGKILL)).start()
    return victim


def assert_replaced(engines, victim):
    """One restart was counted, the old process is reaped, and its descriptors are closed."""
    assert engines.metrics() == {"rollout/restarts": 1} and engines.metrics() == {"rollout/restarts": 0}
    assert not psutil.pid_exists(victim)
    assert [process.pid for process in engine_processes()] == [engines._engine.pid]
    assert shared_memory() == 2, "one buffer, and its mapping's copy of the descriptor"


def shared_memory():
    """Number of descriptors of memory shared with engines."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:oblr-weights" in os.readlink(link) for link in links if os.path.lexists(link))


@pytest.mark.nightly
def test_two_ranks_recover_together(tmp_path):
    """Tensor parallel 2 with an engine each: one dies while idle, the other in the middle of a push."""
    path = make_hf_dir(tmp_path / "model", head_dim=32)
    first, second = run_ranks(one_rank, 2, path, tmp_path / "run", first=fork_keeper)
    for key in ("expected", "idle", "metrics", "pushed", "again", "after"):
        assert first[key] == second[key], f"{key} differs between the ranks"
    assert first["idle"] == first["expected"]
    assert first["metrics"] == [{"rollout/restarts": 1}, {"rollout/restarts": 1}]
    assert first["kept"] and second["kept"] is False, "the engine that lived is the one from before"
    assert first["pushed"] == 2
    assert [one.response_ids for one in first["after"]] == [one.response_ids for one in first["again"]]
    assert [one.logprobs for one in first["after"]] == [one.logprobs for one in first["again"]]
    assert [one.response_ids for one in first["after"]] != [one.response_ids for one in first["expected"]]


def one_rank(path, run_dir):
    """What each rank does. Rank 1's engine is killed between two rollouts, rank 0's in the middle of a push."""
    with layout(tp=2) as parallel:
        engines = ColocatedEngines(make_config(path, run_dir, num_engines=2, max_restarts=1), parallel)
        policy = build_policy(Qwen3Config.from_pretrained(path), ModelConfig(path=path), parallel)
        load_hf_weights(policy, path)
        result = {}
        scale(policy, 1.2)
        engines.push(MegatronWeights(policy), version=1)
        result["expected"] = sample(engines, 7, 3)
        pid = engines._engine.pid
        if parallel.rank == 1:
            os.kill(pid, signal.SIGKILL)
        result["idle"] = sample(engines, 7, 3)
        result["kept"] = engines._engine.pid == pid
        result["metrics"] = [engines.metrics()]
        scale(policy, 1.25)
        victim = engines._engine.pid if parallel.rank == 0 else None
        engines.push(Killing(MegatronWeights(policy), victim), version=2)
        result["metrics"] += [engines.metrics()]
        result["pushed"] = engines.version
        result["after"] = sample(engines, 7, 3)
        engines.push(MegatronWeights(policy), version=3)
        result["again"] = sample(engines, 7, 3)
        engines.close()
        return result


def scale(policy, factor):
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.mul_(factor)
