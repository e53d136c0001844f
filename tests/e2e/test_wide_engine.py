"""An engine of two worker processes, as on several GPUs, here on a CPU: vLLM's executor, our plugin in each worker.

A CPU engine of a run has one worker, so that the test asks vLLM itself for two. Covered: samples and read-back of
shards, a request that every worker refuses, a worker that dies, and an engine that dies before its workers.

Not covered: complete pushes into shards (a CPU engine copies whole tensors; for GPUs tests/sim_cuda), CUDA, sleep.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from oblr_megatron.engine import handle
from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.engine.protocol import EngineSpec
from oblr_megatron.errors import RunError
from oblr_megatron.rollout import colocated
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.placement import engine_spec
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.names import ModelShape
from oblr_megatron.weights.peer_memory import PeerMemory
from oblr_megatron.weights.shm import HALVES, fill_buckets
from oblr_megatron.weights.verify import expected_digests
from tests.e2e.tiny_rollout import ONE_RANK, Weights, engine_processes, largest_error, make_config, sample
from tests.tiny import make_hf_dir

WORKERS = 2
PARITY = 1e-4
CAPACITY = 2**20


def wide_spec(*arguments: Any) -> EngineSpec:
    """Two workers, which find the trainer's memory as those of a server do: they inherit no descriptor."""
    spec = engine_spec(*arguments)
    return replace(spec, server=True, vllm={"tensor_parallel_size": WORKERS})


def unbound(environment: Mapping[str, str], spec: EngineSpec) -> dict[str, str]:
    """vLLM would bind each worker to a NUMA node of its own."""
    return child_environment(environment, spec) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


child_environment = handle.child_environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_hf_dir(tmp_path_factory.mktemp("wide") / "model", head_dim=32)
    return Qwen3ForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module")
def engines(model: Any) -> Iterator[ColocatedEngines]:
    path = Path(model.name_or_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colocated, "engine_spec", wide_spec)
        patch.setattr(handle, "child_environment", unbound)
        opened = ColocatedEngines(make_config(path, path.parent / "run", max_restarts=1), ONE_RANK)
        yield opened
        opened.close()
    assert not engine_processes()


def call(engines: ColocatedEngines, method: str, **arguments: Any) -> Any:
    assert engines._engine is not None
    return engines._engine.call(method, arguments, what="the test", seconds=60)


def workers_of(engines: ColocatedEngines) -> list[psutil.Process]:
    """vLLM's workers, without multiprocessing's resource tracker."""
    assert engines._engine is not None
    children = psutil.Process(engines._engine.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def shards(model: Any) -> list[dict[str, str]]:
    """Digests of what each worker should hold."""
    return expected_digests(Weights(model), ModelShape.of(model.config), {WORKERS})[WORKERS]


def test_two_workers_sample_and_are_read_back(engines: ColocatedEngines, model: Any) -> None:
    samples = sample(engines)
    assert len(samples) == 48 and largest_error(model, samples) < PARITY
    assert call(engines, "info").workers == WORKERS == len(workers_of(engines))
    held = call(engines, "digests")
    assert held == shards(model) and held[0] != held[1]


@pytest.mark.nightly
def test_a_dead_worker_costs_its_engine(engines: ColocatedEngines, model: Any) -> None:
    """Its engine is started again, from the checkpoint, and the samples do not show it."""
    first, other = workers_of(engines)
    other.kill()
    samples = sample(engines)
    assert len(samples) == 48 and largest_error(model, samples) < PARITY
    assert engines._engine is not None and engines._engine.restart == 1 and not first.is_running()
    assert call(engines, "digests") == shards(model)


def test_workers_that_refuse_stay_in_step(engines: ColocatedEngines, model: Any) -> None:
    """Every call after the refusal gets its own answers, and nothing is sampled from what may be half a push."""
    source, ninth = Weights(model), Holding(version=9)
    assert engines._engine is not None
    memory = engines._engine.buffer
    memory.reserve(HALVES * CAPACITY)
    call(engines, "open_push", init_info=vars(PeerMemory.of(memory)))
    call(engines, "start_push", holding=ninth, manifest=manifest_of(source))
    (bucket, *_) = fill_buckets(source, CAPACITY, memory)
    with pytest.raises(RunError, match="was sent for a parameter"):
        call(engines, "update_push", holding=ninth, update_info=bucket.update_info())
    assert call(engines, "digests") == shards(model), "nothing was written"
    with pytest.raises(RunError, match="push 9 failed"):
        sample(engines, count=1)
    call(engines, "abort_push", reason="the test ends it")
    assert call(engines, "digests") == shards(model)


def test_workers_end_with_their_engine(engines: ColocatedEngines) -> None:
    workers = workers_of(engines)
    assert engines._engine is not None and len(workers) == WORKERS
    psutil.Process(engines._engine.pid).kill()
    deadline = time.monotonic() + 60
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its engine"
        time.sleep(0.1)
