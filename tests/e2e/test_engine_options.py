"""[rollout.vllm] reaches real engines and servers, and what they sample stays the policy's.

The oracle for log-probs is transformers; the options are read back from vLLM. Not covered: options of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from oblr_megatron.checks.vllm_options import has_fp8_cache
from oblr_megatron.engine.protocol import SamplingRequest
from oblr_megatron.errors import UserError
from oblr_megatron.rollout.server_checks import check_servers
from oblr_megatron.rollout.servers import ServerEngines
from tests.e2e.api_server import KEY, ApiServer
from tests.e2e.tiny_rollout import ONE_RANK, Weights, change, largest_error, make_config, make_prompts, start
from tests.tiny import make_hf_dir

BOUND = 2e-5
"""Of reported log-probs against the policy's."""
REQUEST = SamplingRequest(group_size=4, temperature=1.0, max_tokens=24, seed=3)
COMMON = tuple(2 + 7 * n % 31 for n in range(36))
PROMPTS = [replace(one, token_ids=(*COMMON, *one.token_ids[:4])) for one in make_prompts(6)]  # they share 36 tokens
CACHING: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("options") / "model", head_dim=32)


def config_line(run_dir: Path, log: str = "*.log") -> str:
    """What vLLM says about its settings in the engine's log."""
    lines = [line for path in run_dir.rglob(log) for line in path.read_text().splitlines()]
    return next(line for line in lines if "Initializing a V1 LLM engine" in line)


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_caching_keeps_the_policys_logprobs_also_after_a_push(model: Path, caching: bool) -> None:
    run_dir, policy = model.parent / f"caching-{caching}", Qwen3ForCausalLM.from_pretrained(model)
    engines = start(model, run_dir, vllm=CACHING | {"enable_prefix_caching": caching})
    try:
        first = engines.generate(PROMPTS, REQUEST)
        assert largest_error(policy, first) < BOUND
        assert [one.logprobs for one in engines.generate(PROMPTS, REQUEST)] == [one.logprobs for one in first]
        change(policy, seed=1)
        engines.push(Weights(policy), 1)
        assert largest_error(policy, engines.generate(PROMPTS, REQUEST)) < BOUND
        assert f"enable_prefix_caching={caching}," in config_line(run_dir)
    finally:
        engines.close()


@pytest.mark.skipif(
    not has_fp8_cache(),
    reason="vLLM's FP8 cache on a CPU needs AVX-512 or AMX",
)
def test_an_fp8_cache_shows_in_the_mismatch(model: Path) -> None:
    """Its log-probs are those that it samples from, and differ from the trainer's."""
    run_dir, policy = model.parent / "fp8", Qwen3ForCausalLM.from_pretrained(model)
    engines = start(model, run_dir, vllm={"kv_cache_dtype": "fp8"})
    try:
        assert 1e-3 < largest_error(policy, engines.generate(PROMPTS, REQUEST)) < 1
        assert "kv_cache_dtype=fp8" in config_line(run_dir)
    finally:
        engines.close()
    with pytest.raises(UserError) as caught:
        make_config(model, run_dir, vllm={"kv_cache_dtype": "fp8"}, importance_sampling="none")
    assert "importance_sampling" in caught.value.fix


@pytest.fixture
def server(model: Path) -> Iterator[ApiServer]:
    options = ["--vllm", "enable_prefix_caching=true", "--vllm", "block_size=32"]
    with ApiServer(model, model.parent / "server.log", options=options) as made:
        yield made


def test_a_server_has_the_options_too(model: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBLR_API_KEY", KEY)
    config = make_config(model, model.parent / "served", servers=[server.url], vllm=CACHING)
    check_servers(config)
    with pytest.raises(UserError) as caught:
        check_servers(make_config(model, model.parent / "served", servers=[server.url], vllm={"block_size": 64}))
    assert "--vllm block_size=64" in caught.value.fix
    policy = Qwen3ForCausalLM.from_pretrained(model)
    served = ServerEngines(config, ONE_RANK)
    for version in (1, 2):
        change(policy, seed=version)
        served.push(Weights(policy), version)
        assert largest_error(policy, served.generate(PROMPTS, REQUEST)) < BOUND
    assert "enable_prefix_caching=True," in config_line(server.log.parent, server.log.name)
    cached = server.info().cached
    assert cached > 0 and cached % 32 == 0, "the prompts share 36 tokens: one block"
    served.close()
