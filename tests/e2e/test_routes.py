"""Routes of a mixture from real vLLM engines: the experts that transformers' model takes for the same tokens.

The engine has room for few sequences, so that some are preempted and computed again, and blocks that the prompts of a
group share. It proposes drafts as well, most of which are rejected. Then its weights change, and it is killed. An API
server returns the same routes as text.

Not covered: vLLM's second model runner, tensor parallelism (GPUs only).
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oblr_megatron.config import Config
from oblr_megatron.engine.identity import ModelIdentity
from oblr_megatron.engine.protocol import RolloutEngine, SamplingRequest
from oblr_megatron.rollout.colocated import ColocatedEngines
from oblr_megatron.rollout.server_checks import check_servers, misfits
from oblr_megatron.rollout.servers import ServerEngines
from oblr_megatron.types import Prompt, Sample
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.tiny_rollout import ONE_RANK, VOCAB, Weights, change, make_config
from tests.tiny import make_moe_hf_dir

BLOCK = 32  # tokens; a prompt of more fills a block, which its group shares
TIGHT = {"kv_cache_gib": 0.0008, "vllm": {"block_size": BLOCK}, "speculation": "ngram", "speculation_below": 64}
CLOSE = 1e-5  # two experts with scores this close may change places by rounding


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_hf_dir(tmp_path_factory.mktemp("routes") / "model", head_dim=32)


def replaying(path: Path, **rollout: object) -> Config:
    config = make_config(path, path.parent / "run", **rollout)
    return config.model_copy(update={"model": config.model.model_copy(update={"moe_routing_replay": True})})


def draw(engines: RolloutEngine, *, routes: bool = True) -> list[Sample]:
    """Ten groups of four, from prompts of 10 to 34 tokens."""
    choice = random.Random(0)
    ids = [tuple(choice.randrange(2, VOCAB) for _ in range(10 + 12 * (n % 3))) for n in range(10)]
    prompts = [Prompt(row=n, id=str(n), text="", token_ids=one, answer="", source="") for n, one in enumerate(ids)]
    return engines.generate(prompts, SamplingRequest(4, 1.0, 30, seed=3, routes=routes))


def check(model: PreTrainedModel, samples: Sequence[Sample]) -> None:
    """Each sample has the routes of all its tokens but the last, in order of their scores."""
    compared = 0
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        scores = torch.stack([layer.view(ids.numel(), -1).softmax(-1) for layer in logits], dim=1)[:-1]
        best = scores.topk(model.config.num_experts_per_tok + 1, dim=-1)
        clear = (best.values.diff(dim=-1).abs() > CLOSE).all(-1)
        assert sample.routes is not None and sample.routes.dtype == np.int16
        assert sample.routes.shape == (ids.numel(), len(logits), model.config.num_experts_per_tok)
        assert (sample.routes[-1] == -1).all()
        assert np.array_equal(sample.routes[:-1][clear], best.indices[..., :-1][clear])
        compared += int(clear.sum())
    assert compared > 3000


@pytest.fixture(scope="module")
def engines(path: Path) -> Iterator[ColocatedEngines]:
    opened = ColocatedEngines(replaying(path, **TIGHT), ONE_RANK)
    yield opened
    opened.close()


def test_routes_are_those_of_transformers(engines: ColocatedEngines, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = draw(engines)
    check(model, before)
    assert all(sample.routes is None for sample in draw(engines, routes=False)), "an evaluation asks for none"
    change(model, seed=0)
    engines.push(Weights(model), 1)
    after = draw(engines)
    check(model, after)
    assert [sample.version for sample in after] == [1] * len(after)
    with pytest.raises(AssertionError):
        check(model, before)
    assert engines._engine is not None
    os.kill(engines._engine.pid, signal.SIGKILL)
    again = draw(engines)
    assert engines.metrics()["rollout/restarts"] == 1
    assert again == after
    assert all(np.array_equal(one.routes, two.routes) for one, two in zip(again, after, strict=True))


def test_a_server_returns_them_as_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    with ApiServer(path, path.parent / "server.log", options=["--moe-routing-replay"]) as server:
        config = replaying(path, servers=[server.url])
        check_servers(config)
        engines = ServerEngines(config, ONE_RANK)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for version in (0, 1):
            engines.push(Weights(model), version)
            check(model, draw(engines))
            change(model, seed=version)
        assert all(sample.routes is None for sample in draw(engines, routes=False))
        engines.close()
        info = server.info()
        ((_, fix),) = misfits(info.model_copy(update={"routes": False}), config, ModelIdentity.of(path))
        assert fix == "start it with --moe-routing-replay"
