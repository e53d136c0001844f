"""Routes as vLLM returns them, as samples hold them and as servers send them; engines that could not return any.

Not covered: their values (tests/e2e/test_routes.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oblr_megatron.checks.vllm_options import check_routes
from oblr_megatron.engine import http_messages as http
from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.protocol import EngineSpec, PromptRequest, SamplingRequest
from oblr_megatron.engine.routes import WORKER, allow_on_cpu, routes_of
from oblr_megatron.engine.serve_command import spec_of
from oblr_megatron.errors import RunError, UserError
from oblr_megatron.types import Sample
from tests.unit.configs import config_with
from tests.unit.engine.test_serve_command import serve_options

MIXTURE = {"num_experts": 8}
CPU = EngineSpec("engine 0", Path("/m"), "float32", "cpu", 64, 8, 2**20, num_threads=1)


def rows(experts: int, tokens: int = 3) -> np.ndarray:
    dtype = np.uint8 if experts <= 256 else np.uint16  # as vLLM does
    return np.random.default_rng(0).integers(0, experts, (tokens, 4, 2)).astype(dtype)


def test_the_last_token_has_no_route() -> None:
    routes = routes_of(rows(256), 4)
    assert routes.dtype == np.int16 and routes.shape == (4, 4, 2)
    assert np.array_equal(routes[:-1], rows(256)) and (routes[-1] == -1).all()
    for returned, tokens in ((rows(256), 3), (rows(256), 5), (None, 4)):
        with pytest.raises(RunError, match=f"sample of {tokens} tokens"):
            routes_of(returned, tokens)


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (300, "<i2")])
def test_a_server_sends_them_as_text(experts: int, dtype: str) -> None:
    sample = Sample(2, (5, 9), (7, 1), (-0.1, -0.2), "", "stop", 3, routes=routes_of(rows(experts), 4))
    asked = (PromptRequest(0, (5, 9), SamplingRequest(1, 1.0, 8, 0, routes=True), position=2),)
    for one in (sample, replace(sample, routes=None)):
        answer = http.SampleAnswer(holding=http.Holding(version=3), groups=[[http.to_response(one)]])
        received = http.SampleAnswer.model_validate_json(answer.model_dump_json())
        (((back,)),) = received.samples(asked)
        assert back == one and (back.routes is None) == (one.routes is None)
    assert back.routes is None and answer.groups[0][0].routes is None
    text = http.to_response(sample).routes
    assert text is not None and text.dtype == dtype and np.array_equal(text.routes(4), sample.routes)
    for change in ({"data": text.data[:-4]}, {"data": "%"}, {"shape": (3, 4, 3)}, {"shape": (-1, 0, 2)}):
        with pytest.raises(RunError):
            text.model_copy(update=change).routes(4)


def test_engines_and_servers_are_started_with_the_option() -> None:
    assert "enable_return_routed_experts" not in vllm_arguments(CPU, "b")
    found = vllm_arguments(replace(CPU, routes=True), "b")
    assert found["enable_return_routed_experts"] is True and found["worker_cls"] == WORKER
    for device, worker in (("cpu", True), ("cuda", False)):
        spec = spec_of(serve_options("--moe-routing-replay"), device)  # type: ignore[arg-type]
        found = vllm_arguments(spec, "b")
        assert found["enable_return_routed_experts"] is True and ("worker_cls" in found) == worker


def test_only_our_worker_passes_vllms_check() -> None:
    """Other engines still need the second model runner."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig

    allow_on_cpu()
    allow_on_cpu()
    fields: dict[str, Any] = {
        "aux_output_config": SimpleNamespace(enabled=True),
        "use_v2_model_runner": False,
        "model_config": SimpleNamespace(runner_type="pooling"),
    }
    for worker, reason in (("auto", "Model Runner V2"), (WORKER, "generate runners")):
        config: Any = SimpleNamespace(**fields, parallel_config=SimpleNamespace(worker_cls=worker))
        with pytest.raises(ValueError, match=reason):
            VllmConfig._verify_aux_output_compatibility(config)


@pytest.mark.parametrize(
    ("hf_config", "options", "speculation", "on_gpu", "named"),
    [
        ({}, {}, "none", True, "mixture"),
        (MIXTURE, {"enable_prefix_caching": False}, "none", False, "prefix caching"),
        (MIXTURE, {}, "suffix", True, "suffix"),
    ],
)
def test_engines_that_cannot(
    hf_config: dict[str, Any], options: dict[str, Any], speculation: str, on_gpu: bool, named: str
) -> None:
    for possible, text in (({"block_size": 32}, "ngram"), ({"enable_prefix_caching": True}, "none")):
        check_routes(MIXTURE, possible, text, on_gpu=on_gpu, where="here")
    with pytest.raises(UserError, match=named) as caught:
        check_routes(hf_config, options, speculation, on_gpu=on_gpu, where="here")
    assert caught.value.where == "here"


def test_environments_are_refused() -> None:
    replay, played = "model.moe_routing_replay=true", "rollout.environment=tests.e2e.environments:calculator"
    config_with(replay)
    with pytest.raises(UserError, match=r"rollout.environment with model.moe_routing_replay"):
        config_with(replay, played)
