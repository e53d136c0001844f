"""Pushes of a LoRA adapter alone: vLLM's samples then have the log-probs of the merged model, push after push.

Every push is read back and compared (weights.verify). PEFT's own logits: tests/unit/checkpoint/test_peft_dir.py. Not
covered: GPUs, and a level-2 sleep, which vLLM has on GPUs only (its state: tests/unit/engine/test_state.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from oblr_megatron.checkpoint.hf_dir import check_hf_dir
from oblr_megatron.checkpoint.peft_dir import check_adapter_dir
from oblr_megatron.config import Config, WeightsConfig
from oblr_megatron.config.lora import LoraConfig
from oblr_megatron.engine.protocol import PushStats
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.recovery import RecoveringEngines
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.weights.adapter import AdapterShape, AdapterWeights
from tests.adapters import ALL, Adapter, merged, write
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.tiny_rollout import ONE_RANK, Weights, engine_processes, largest_error, make_config, sample
from tests.tiny import make_hf_dir

RANK, ALPHA = 4, 6.0  # vLLM pads the slot to rank 8
PARITY = 1e-5
CHANGED = 1e-2  # of a log-prob by another adapter


class Lora:
    """A base model and its engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base, self.shape = AutoModelForCausalLM.from_pretrained(self.path), AdapterShape(RANK, ALL)
        self.engines: RecoveringEngines = ColocatedEngines(self.config(path.parent / "run"), ONE_RANK, lora=self.shape)

    def config(self, run_dir: Path, **rollout: Any) -> Config:
        """With the adapters' settings, which a returning server's are compared with."""
        config = make_config(self.path, run_dir, **rollout)
        model = config.model.model_copy(update={"lora": LoraConfig(rank=RANK, targets=ALL)})
        adapters = config.rollout.model_copy(update={"lora": "adapter"})
        return config.model_copy(update={"model": model, "rollout": adapters, "weights": WeightsConfig(verify=True)})

    def adapter(self, seed: int) -> Adapter:
        return Adapter(self.path, RANK, ALL, seed)

    def push(self, adapter: Adapter, version: int, engines: RecoveringEngines | None = None) -> PushStats:
        weights = AdapterWeights(adapter, Weights(self.base), ALPHA / RANK)
        return (engines or self.engines).push(weights, version)

    def error(self, adapter: Adapter, engines: RecoveringEngines | None = None) -> float:
        return largest_error(merged(self.path, adapter, ALPHA), sample(engines or self.engines, count=6))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lora]:
    opened = Lora(make_hf_dir(tmp_path_factory.mktemp("lora") / "model", head_dim=32, tied=True))
    yield opened
    opened.engines.close()


def test_logprobs_are_those_of_the_merged_model_push_after_push(lora: Lora) -> None:
    first, second = lora.adapter(1), lora.adapter(2)
    whole = lora.push(first, 0)
    assert lora.error(first) < PARITY < CHANGED < lora.error(second)
    alone = lora.push(second, 1)
    assert alone.tensors == len(second.tensors) == whole.tensors - len(list(lora.base.parameters()))
    assert alone.bytes == sum(tensor.nbytes for tensor in second.tensors.values())
    assert lora.error(second) < PARITY < CHANGED < lora.error(first)


@pytest.mark.nightly
def test_a_restarted_engine_gets_the_base_and_the_adapter(lora: Lora) -> None:
    adapter = lora.adapter(1)
    size = lora.push(adapter, 2).bytes
    before = sample(lora.engines, count=6)
    for process in engine_processes():
        process.send_signal(signal.SIGKILL)
    assert sample(lora.engines, count=6) == before
    assert lora.push(adapter, 3).bytes <= size
    assert lora.error(adapter) < PARITY


@pytest.mark.nightly
def test_an_engine_that_starts_with_a_directory_samples_from_it(lora: Lora, tmp_path: Path) -> None:
    """It is read by vLLM's own reader of PEFT's format."""
    adapter = lora.adapter(3)
    write(adapter, tmp_path / "adapter", ALPHA)
    held = check_adapter_dir(tmp_path / "adapter", check_hf_dir(lora.path))
    engines = ColocatedEngines(
        make_config(lora.path, tmp_path / "run"), ONE_RANK, lora=held.shape, adapter=tmp_path / "adapter"
    )
    try:
        assert largest_error(merged(lora.path, adapter, ALPHA), sample(engines, count=6)) < PARITY
    finally:
        engines.close()


@pytest.mark.nightly
def test_servers_get_the_base_once_and_again_when_they_lost_it(
    lora: Lora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lose it in a restart, and to another run that pushes its own."""
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    first, second = lora.adapter(1), lora.adapter(2)
    size = sum(tensor.nbytes for tensor in first.tensors.values())
    with ApiServer(lora.path, tmp_path / "log", options=["--lora", str(first.shape)]) as server:
        config = lora.config(tmp_path / "run", servers=[server.url])
        one, two = (ServerEngines(config, ONE_RANK, lora=lora.shape) for _ in range(2))
        try:
            assert lora.push(first, 0, one).bytes > size
            assert lora.push(second, 1, one).bytes == size
            assert lora.error(second, one) < PARITY
            before = sample(one, count=6)
            server.end(signal.SIGKILL)
            server.start()
            assert sample(one, count=6) == before
            assert lora.push(first, 0, two).bytes > size
            assert lora.error(first, two) < PARITY
            assert lora.push(second, 2, one).bytes > size
            assert lora.error(second, one) < PARITY
        finally:
            one.close()
            two.close()
