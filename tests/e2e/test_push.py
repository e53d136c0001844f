"""Wrong pushes into a real engine process: it refuses each one, and never serves half a model.

The test talks to the engine process directly, so the trainer's checks cannot hide a fault. In every case the engine
refuses to generate until a complete push has come, and then generates what it generated before. Where nothing had been
written yet, the old weights are in place bit for bit.

Not covered: every other wrong push (tests/unit/engine/test_state.py), the trainer's side (test_rollout.py), deaths
(test_rollout_failures.py), CUDA IPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from oblr_megatron.checkpoint.hf_dir import SINGLE, checkpoint_shapes
from oblr_megatron.config import WeightsConfig
from oblr_megatron.engine.http_messages import Holding
from oblr_megatron.errors import DamagedError, RunError, WeightError
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights.manifest import manifest_of
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT, ModelShape
from oblr_megatron.weights.shm import HALVES, Bucket, SharedBuffer, fill_buckets
from oblr_megatron.weights.verify import expected_digests
from tests.e2e.tiny_rollout import ONE_RANK, Weights, change, make_config, sample
from tests.tiny import make_hf_dir

CAPACITY = 4096  # of a bucket: the model takes more than ten, and its embedding two
NORM, K = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"

NINTH = Holding(version=9)

Damage = Callable[[int, Bucket, SharedBuffer], None]


class Direct:
    """Direct calls to one engine process, and the weights that it should hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = make_config(path, path.parent / "run")
        self.engines = ColocatedEngines(config, ONE_RANK)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.loaded = self.read_back()  # what vLLM loaded from the checkpoint
        self.memory.reserve(HALVES * CAPACITY)
        self.call("open_push", init_info={"fd": self.memory.fd})

    @property
    def memory(self) -> SharedBuffer:
        return self.engines._engine.buffer

    def call(self, method: str, **arguments: Any) -> Any:
        return self.engines._engine.call(method, arguments, what="the test", seconds=60)

    def read_back(self) -> dict[str, str]:
        (found,) = self.call("digests")
        return found

    def expected(self, source: Weights) -> dict[str, str]:
        (found,) = expected_digests(source, ModelShape.of(self.model.config), {1})[1]
        return found

    def send(self, source: Weights, damage: Damage | None = None) -> None:
        """A push as the trainer makes it; `damage` runs between writing and reading a bucket."""
        self.call("start_push", holding=NINTH, manifest=manifest_of(source))
        self.send_buckets(source, damage)
        self.call("finish_push", holding=NINTH)

    def send_buckets(self, source: Weights, damage: Damage | None = None) -> None:
        for index, bucket in enumerate(fill_buckets(source, CAPACITY, self.memory)):
            if damage is not None:
                damage(index, bucket, self.memory)
            self.call("update_push", holding=NINTH, update_info=bucket.update_info())


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    path = make_hf_dir(tmp_path_factory.mktemp("push") / "model", head_dim=32)
    opened = Direct(path)
    yield opened
    opened.engines.close()


@pytest.fixture
def recovers(direct: Direct) -> Iterator[None]:
    """A complete push before the test. After it the engine refuses, until a complete push restores it."""
    weights = Weights(direct.model)
    direct.engines.push(weights, direct.engines.version + 1)
    before, held = sample(direct.engines, count=4), direct.read_back()
    assert held == direct.expected(weights)
    yield
    with pytest.raises(RunError, match="push 9 failed"):
        sample(direct.engines, count=4)
    direct.engines.push(weights, direct.engines.version + 1)
    assert direct.read_back() == held
    after = sample(direct.engines, count=4)
    assert [(one.response_ids, one.logprobs) for one in after] == [(one.response_ids, one.logprobs) for one in before]


def test_what_vllm_loaded_is_found_in_its_parameters(direct: Direct) -> None:
    """The mapping used to write and read back buckets, against vLLM's own loader."""
    assert direct.loaded == direct.expected(Weights(direct.model))
    assert direct.loaded.keys() == checkpoint_shapes(direct.path).keys()


@pytest.mark.usefixtures("recovers")
@pytest.mark.parametrize("position", [0, 6])
def test_a_byte_changed_in_the_shared_memory(direct: Direct, position: int) -> None:
    """In the first bucket nothing is written yet; in a later one half the model is from the new push."""
    held = direct.read_back()
    other = Qwen3ForCausalLM.from_pretrained(direct.path)
    change(other, seed=1)

    def flip(index: int, bucket: Bucket, memory: SharedBuffer) -> None:
        if index == position:
            memory.bytes[bucket.start + bucket.used // 2] ^= 1

    with pytest.raises(DamagedError, match=r"[0-9a-f]{16}.*[0-9a-f]{16}.*model\."):
        direct.send(Weights(other), damage=flip)
    changed = {name for name, found in direct.read_back().items() if found != held[name]}
    assert bool(changed) == (position > 0) and len(changed) < len(held)
    assert direct.read_back() != direct.expected(Weights(other))


@pytest.mark.usefixtures("recovers")
def test_a_manifest_of_another_model(direct: Direct) -> None:
    held = direct.read_back()
    with pytest.raises(RunError, match=r"model.norm.weight \[47\].*\[48\]"):
        direct.send(Weights(direct.model, {NORM: torch.ones(47)}))
    assert direct.read_back() == held


@pytest.mark.usefixtures("recovers")
def test_a_push_that_is_cut_short(direct: Direct) -> None:
    half = Weights(direct.model)
    half.tensors = {name: tensor + 1 for name, tensor in half.tensors.items() if name != "lm_head.weight"}
    direct.call("start_push", holding=NINTH, manifest=manifest_of(Weights(direct.model)))
    direct.send_buckets(half)
    with pytest.raises(RunError, match="lm_head"):
        direct.call("finish_push", holding=NINTH)


def test_verify_names_the_tensor_that_is_not_what_was_pushed(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's k changes between the push and its verification, which no checksum can see."""

    class Moving(Weights):
        passes = 0

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.passes += 1
            for name, tensor in super().__iter__():
                yield name, tensor + (self.passes - 1 if name == K else 0)

    monkeypatch.setattr(direct.engines._pusher, "_options", WeightsConfig(verify=True))
    version = direct.engines.version + 1
    direct.engines.push(Weights(direct.model), version)
    with pytest.raises(RunError, match=K):
        direct.engines.push(Moving(direct.model), version + 1)
    direct.engines._unusable = None  # the trainer's side; the engine process refuses as well
    with pytest.raises(RunError, match=f"push {version + 1} failed.*{K}"):
        sample(direct.engines, count=4)


def test_an_engine_that_keeps_a_weight_which_no_push_replaces(tmp_path: Path) -> None:
    """vLLM is told that a tied model is untied: it loads the stored copy of the embedding as an output layer."""
    path = make_hf_dir(tmp_path / "model", tied=True, head_dim=32)
    tensors = load_file(path / SINGLE)
    save_file(tensors | {HF_OUTPUT: tensors[HF_EMBEDDING].clone()}, path / SINGLE, metadata={"format": "pt"})
    weights = Weights(AutoModelForCausalLM.from_pretrained(path))
    for kept in (False, True):
        config = make_config(path, tmp_path / f"run{kept}")
        if kept:  # a config refuses this option: checks/vllm_options.py
            config.rollout.vllm["hf_overrides"] = {"tie_word_embeddings": False}
        engines = ColocatedEngines(config, ONE_RANK)
        try:
            if not kept:
                engines.push(weights, 1)
                continue
            with pytest.raises(WeightError, match=r"1 parameters that no push writes: lm_head\.weight"):
                engines.push(weights, 1)
            with pytest.raises(RunError, match="push 1"):
                sample(engines, count=1)
        finally:
            engines.close()
