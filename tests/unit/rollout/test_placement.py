"""Owners of the engines, their shares of prompts, and the environment of an engine process.

Does not cover the processes themselves (tests/e2e).
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import SchedulerConfig

from oblr_megatron.engine.arguments import vllm_arguments
from oblr_megatron.engine.handle import child_environment
from oblr_megatron.engine.protocol import MAX_TEMPERATURE, MIN_TEMPERATURE, EngineSpec, SamplingRequest
from oblr_megatron.engine.samples import sampling_params
from oblr_megatron.engine.serve_command import check_quantization
from oblr_megatron.errors import UserError
from oblr_megatron.rollout.placement import Placement, engine_spec, place
from oblr_megatron.weights.adapter import AdapterShape
from tests.unit.configs import config_with

TORCHRUN = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "TORCH_FR_BUFFER_SIZE CUDA_DEVICE_MAX_CONNECTIONS "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS "
    "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND"
)
CPU = EngineSpec("engine 0", Path("/m"), "float32", "cpu", 64, 8, 2**20, num_threads=3)
GPU = EngineSpec("engine 0", Path("/m"), "bfloat16", "cuda", 64, 8, 2**20, num_threads=3, visible_devices="2,3")


def config(**rollout):
    return config_with(rollout=rollout)


@pytest.mark.parametrize(
    ("rollout", "ranks", "on_gpu", "owners"),
    [
        ({}, 4, False, (0,)),
        ({"num_engines": 3}, 4, False, (0, 1, 2)),
        ({}, 4, True, (0, 1, 2, 3)),
        ({"tensor_parallel_size": 4}, 8, True, (0, 4)),
        ({"tensor_parallel_size": 4, "num_engines": 1}, 4, True, (0,)),
        ({"tensor_parallel_size": 3}, 6, True, (0, 3)),
    ],
)
def test_owners_are_the_first_ranks_of_their_blocks(rollout, ranks, on_gpu, owners):
    placement = place(config(**rollout), ranks, ranks, on_gpu=on_gpu)
    assert placement.owners == owners
    assert [placement.engine_of(owner) for owner in owners] == list(range(len(owners)))
    assert placement.engine_of(ranks) is None


@pytest.mark.parametrize(
    ("rollout", "nodes", "per_node", "on_gpu", "said"),
    [
        ({"num_engines": 3}, 1, 2, False, "3.*1.*2"),
        ({"tensor_parallel_size": 4}, 1, 2, True, "4.*2"),
        ({"num_engines": 2}, 1, 8, True, "2 engines of 1 GPU leave some of the 8 GPUs"),
        ({"tensor_parallel_size": 4}, 1, 6, True, "1 engine of 4 GPUs leave some of the 6 GPUs"),
        ({"tensor_parallel_size": 2}, 1, 4, False, "tensor_parallel_size 2"),
        ({"tensor_parallel_size": 16}, 4, 8, True, "ranks 0 to 15"),
        ({"tensor_parallel_size": 4}, 4, 6, True, "ranks 4 to 7"),
        ({"tensor_parallel_size": 3}, 4, 6, True, None),
        ({"tensor_parallel_size": 8}, 4, 8, True, None),
    ],
)
def test_engines_that_do_not_fit_or_cross_nodes_are_refused(rollout, nodes, per_node, on_gpu, said):
    with pytest.raises(UserError, match=said) if said else nullcontext() as error:
        place(config(**rollout), nodes * per_node, per_node, on_gpu=on_gpu)
    assert error is None or error.value.where == "config: rollout"


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 50])
def test_shares_are_contiguous_and_cover_every_prompt_once(engines, count):
    placement = Placement(tuple(range(engines)), 1)
    shares = [placement.share(count, engine) for engine in range(engines)]
    assert shares[0].start == 0 and shares[-1].stop == count
    assert all(left.stop == right.start for left, right in pairwise(shares))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("device", "level", "able"), [("cuda", 0, False), ("cuda", 1, True), ("cpu", 2, False)])
def test_sleep_mode_is_on_for_gpu_engines_with_a_sleep_level(device, level, able):
    parallel = SimpleNamespace(device=torch.device(device))
    spec = engine_spec(config(sleep_level=level), parallel, 0, Placement((0,), 1))
    assert (spec.device, spec.sleep_mode) == (device, able)


def test_an_engine_gets_no_variables_of_torchrun_and_no_network():
    torchrun = dict.fromkeys(TORCHRUN.split(), "1")
    child = child_environment(torchrun | {"PATH": "/bin", "MY_OWN": "kept"}, CPU)
    assert not (torchrun.keys() - {"OMP_NUM_THREADS"}) & child.keys()
    assert child["PATH"] == "/bin" and child["MY_OWN"] == "kept"
    assert child["OMP_NUM_THREADS"] == "3" and child["OMP_WAIT_POLICY"] == "PASSIVE"
    assert child["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert child["HF_HUB_OFFLINE"] == child["VLLM_NO_USAGE_STATS"] == "1"


def test_an_engine_takes_groups_above_vllms_default_limit(monkeypatch):
    name = "VLLM_MAX_N_SEQUENCES"
    monkeypatch.setenv(name, child_environment({}, CPU)[name])
    assert sampling_params(SamplingRequest(20_000, 1.0, 4, seed=1), 0, 64).n == 20_000


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_vllm_accepts_the_lowest_and_the_highest_temperature(temperature):
    assert sampling_params(SamplingRequest(2, temperature, 4, seed=1), 0, 64).temperature == temperature
    assert config(temperature=temperature).rollout.temperature == temperature


def test_an_engine_that_splits_no_prompt_takes_a_token_of_every_sequence():
    """As vLLM checks it: here without an adapter, and with one and drafts (`EngineArgs.create_engine_config`)."""
    arguments = vllm_arguments(replace(CPU, max_num_seqs=5000), "b")
    names = "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"
    assert SchedulerConfig(**{name: arguments[name] for name in names}, is_encoder_decoder=False)
    drafting = replace(CPU, max_num_seqs=1000, speculation="ngram", lora=AdapterShape(4, ("q_proj",)))
    arguments = vllm_arguments(drafting, "b")
    drafts = arguments["speculative_config"]["num_speculative_tokens"]
    assert arguments["max_num_batched_tokens"] == 1000 * (drafts + 1)


def test_a_gpu_engine_sees_its_blocks_devices():
    assert child_environment({"VLLM_PLUGINS": "own"}, CPU)["VLLM_PLUGINS"] == "own,oblr_megatron"
    child = child_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, GPU)
    assert child["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "OMP_NUM_THREADS" not in child and "TORCHDYNAMO_DISABLE" not in child


def test_an_engine_in_fp8_rounds_what_it_loads_and_what_is_pushed():
    """With one of vLLM's online schemes; its plain "fp8" needs a checkpoint that is rounded already."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES, resolve_quantization_config
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    parallel = SimpleNamespace(device=torch.device("cuda"))
    run = config_with(model={"dtype": "bfloat16"}, rollout={"quantization": "fp8"})
    spec = engine_spec(run, parallel, 0, Placement((0,), 1))
    assert vllm_arguments(spec, "b")["quantization"] in ONLINE_QUANT_SHORTHAND_NAMES
    ignored = vllm_arguments(spec, "b")["quantization_config"]
    online = OnlineQuantizationConfig(resolve_quantization_config(spec.vllm_quantization, ignored))
    layers = [(GateLinear, "mlp.gate"), (LinearBase, "self_attn.qkv_proj"), (LinearBase, "mlp.gate_up_proj")]
    rounded = [online.resolve_quant_method_cls(kind, f"model.layers.0.{name}") is not None for kind, name in layers]
    assert rounded == [False, True, True], "routers keep their dtype"
    assert "quantization" not in vllm_arguments(GPU, "b")
    with pytest.raises(UserError, match=r"fp8 .*--quantization"):
        check_quantization(replace(CPU, quantization="fp8"))
    with pytest.raises(UserError, match="float32"):
        check_quantization(replace(GPU, quantization="fp8", dtype="float32"))


@pytest.mark.parametrize(
    ("head_dtype", "dtype", "device", "wide"),
    [
        ("float32", "bfloat16", "cpu", True),
        ("auto", "bfloat16", "cpu", False),
        ("auto", "bfloat16", "cuda", True),
        ("model", "bfloat16", "cuda", False),
        ("float32", "float32", "cpu", False),
    ],
)
def test_logits_of_bf16_weights_are_fp32_by_vllms_own_option(head_dtype, dtype, device, wide):
    run = config_with(model={"dtype": dtype, "head_dtype": head_dtype})
    spec = engine_spec(run, SimpleNamespace(device=torch.device(device)), 0, Placement((0,), 1))
    overrides = vllm_arguments(spec, "b").get("hf_overrides")
    assert overrides == ({"head_dtype": "float32"} if wide else None)
