"""A real engine is sent pushes that are wrong in one way each: it names the fault, and never serves half a model.

Here the test speaks to the engine process itself, so that nothing on the trainer's side mends or hides the fault.
Wherever nothing had been written yet, the old weights are bit for bit in place; in every case the engine refuses to
generate until a complete push has come, and then generates what it generated before.

Not covered: what the trainer's side does (test_rollout.py), deaths (test_rollout_failures.py), CUDA IPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from oblr_megatron.checkpoint.hf_dir import checkpoint_shapes
from oblr_megatron.config import WeightsConfig
from oblr_megatron.errors import DamagedError, RunError
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.weights.manifest import Manifest, manifest_of
from oblr_megatron.weights.names import ModelShape
from oblr_megatron.weights.shm import HALVES, Bucket, SharedBuffer, fill_buckets
from oblr_megatron.weights.verify import expected_digests
from tests.e2e.tiny_rollout import ONE_RANK, Weights, change, make_config, sample
from tests.tiny import make_hf_dir

CAPACITY = 4096  # of a bucket: the model takes more than ten, and its embedding two
NORM, K = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"

Damage = Callable[[int, Bucket, SharedBuffer], None]


class Line:
    """The test's line to one engine, and what it should hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = make_config(path, path.parent / "run")
        self.engines = ColocatedEngines(config, ONE_RANK)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.loaded = self.read_back()  # by vLLM, from the checkpoint
        self.memory.reserve(HALVES * CAPACITY)
        self.call("init_transfer", init_info={"fd": self.memory.fd})

    @property
    def memory(self) -> SharedBuffer:
        return self.engines._engine.buffer

    def call(self, method: str, **arguments: Any) -> Any:
        return self.engines._engine.call(method, arguments, what="the test", seconds=60)

    def read_back(self) -> dict[str, str]:
        (found,) = self.call("read_back")
        return found

    def expected(self, source: Weights) -> dict[str, str]:
        (found,) = expected_digests(source, ModelShape.of(self.model.config), workers=1)
        return found

    def send(self, source: Weights, manifest: Manifest | None = None, damage: Damage | None = None) -> None:
        """A push as the trainer makes it, with another manifest or with damage between writing and reading."""
        self.call("start_push", manifest=manifest or manifest_of(source), version=9)
        self.send_buckets(source, damage)
        self.call("finish_push", version=9)

    def send_buckets(self, source: Weights, damage: Damage | None = None) -> None:
        for index, bucket in enumerate(fill_buckets(source, CAPACITY, self.memory)):
            if damage is not None:
                damage(index, bucket, self.memory)
            self.call("update_weights", update_info=bucket.update_info())


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    path = make_hf_dir(tmp_path_factory.mktemp("push") / "model", head_dim=32)
    opened = Line(path)
    yield opened
    opened.engines.close()


@pytest.fixture
def recovers(line: Line) -> Iterator[None]:
    """Before the test a complete push; after it the engine refuses, and a complete push makes it what it was."""
    weights = Weights(line.model)
    line.engines.push(weights, line.engines.version + 1)
    before, held = sample(line.engines, count=4), line.read_back()
    assert held == line.expected(weights)
    yield
    with pytest.raises(RunError, match="generates again after a complete push"):
        sample(line.engines, count=4)
    line.engines.push(weights, line.engines.version + 1)
    assert line.read_back() == held
    after = sample(line.engines, count=4)
    assert [(one.response_ids, one.logprobs) for one in after] == [(one.response_ids, one.logprobs) for one in before]


def test_what_vllm_loaded_is_found_in_its_parameters(line: Line) -> None:
    """The map that buckets are written by, and read back by, against vLLM's own loader."""
    assert line.loaded == line.expected(Weights(line.model))
    assert line.loaded.keys() == checkpoint_shapes(line.path).keys()


@pytest.mark.usefixtures("recovers")
@pytest.mark.parametrize("position", [0, 6])
def test_a_byte_changed_in_the_shared_memory(line: Line, position: int) -> None:
    """In the first bucket, before anything is written; in a later one, when half the model is another's."""
    held = line.read_back()
    other = Qwen3ForCausalLM.from_pretrained(line.path)
    change(other, seed=1)

    def flip(index: int, bucket: Bucket, memory: SharedBuffer) -> None:
        if index == position:
            memory.bytes[bucket.start + bucket.used // 2] ^= 1

    with pytest.raises(DamagedError, match=r"checksum is [0-9a-f]{16}, the trainer's was [0-9a-f]{16} \(model"):
        line.send(Weights(other), damage=flip)
    changed = {name for name, found in line.read_back().items() if found != held[name]}
    assert bool(changed) == (position > 0) and len(changed) < len(held)
    assert line.read_back() != line.expected(Weights(other))


@pytest.mark.usefixtures("recovers")
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param({NORM: None}, "model.norm.weight is missing", id="missing"),
        pytest.param({"model.extra.weight": torch.ones(3)}, "model.extra.weight is not in the model", id="extra"),
        pytest.param({NORM: torch.ones(47)}, r"model.norm.weight \[47\], the model has \[48\]", id="shape"),
        pytest.param(
            {NORM: torch.ones(48, dtype=torch.bfloat16)},
            "model.norm.weight bfloat16, the model has float32",
            id="dtype",
        ),
    ],
)
def test_a_manifest_that_is_not_the_models(line: Line, edit: dict[str, torch.Tensor | None], message: str) -> None:
    held = line.read_back()
    with pytest.raises(RunError, match=message):
        line.send(Weights(line.model, edit))
    assert line.read_back() == held


@pytest.mark.usefixtures("recovers")
def test_another_order_than_the_manifests(line: Line) -> None:
    """The first tensor alone is in its place."""
    reordered = Weights(line.model)
    first, *rest = reordered.tensors.items()
    reordered.tensors = dict([first, *reversed(rest)])
    held = line.read_back()
    with pytest.raises(RunError, match=r"the push sent lm_head.weight .* where its manifest has model.layers.0"):
        line.send(reordered, manifest=manifest_of(Weights(line.model)))
    assert line.read_back() == held


@pytest.mark.usefixtures("recovers")
def test_a_push_that_is_cut_short(line: Line) -> None:
    half = Weights(line.model)
    half.tensors = {name: tensor + 1 for name, tensor in half.tensors.items() if name != "lm_head.weight"}
    line.call("start_push", manifest=manifest_of(Weights(line.model)), version=9)
    line.send_buckets(half)
    with pytest.raises(RunError, match=r"the push ended without lm_head.weight"):
        line.call("finish_push", version=9)


@pytest.mark.usefixtures("recovers")
def test_a_bucket_without_a_push(line: Line) -> None:
    line.call("abort_push", reason="the test wants it so")
    held = line.read_back()
    with pytest.raises(RunError, match="no push is open"):
        line.send_buckets(Weights(line.model))
    assert line.read_back() == held


@pytest.mark.usefixtures("recovers")
def test_verify_names_the_tensor_that_is_not_what_was_pushed(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's k changes between its push and the look at it: no checksum can see that."""

    class Moving(Weights):
        passes = 0

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.passes += 1
            for name, tensor in super().__iter__():
                yield name, tensor + (self.passes - 1 if name == K else 0)

    monkeypatch.setattr(line.engines._pusher, "_options", WeightsConfig(verify=True))
    line.engines.push(Weights(line.model), line.engines.version + 1)
    with pytest.raises(RunError, match=f"{K} is not in engine 0 what was pushed as"):
        line.engines.push(Moving(line.model), line.engines.version + 1)
    line.engines._unusable = None  # of the trainer's side; the engine itself refuses, too
