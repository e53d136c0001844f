"""A mixture of experts on a CPU: every push arrives, and a whole run trains it.

After a push vLLM's log-probs are those of transformers, fp32; also after a damaged push. The run has experts on two
ranks, router losses and routing replay; the routes reach both ranks from the engine, and from the saved samples.

Not covered: a rise in accuracy (examples/tiny_moe_cpu); a mixture in a GPU engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.config import WeightsConfig
from oblr_megatron.errors import DamagedError, RunError
from oblr_megatron.norms.oracle import oracle_logits
from oblr_megatron.weights.shm import Bucket, SharedBuffer
from tests.e2e.conftest import records
from tests.e2e.forked import call_forked, forked, forked_cli, run_script
from tests.e2e.test_push import Direct
from tests.e2e.test_train import check_lora_run
from tests.e2e.tiny_rollout import Weights, change, largest_error, sample
from tests.tiny import make_moe_hf_dir

PARITY = 2e-5  # rounding of fp32
STEPS = 3


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    """An engine with a mixture; every push to it is read back."""
    opened = Direct(make_moe_hf_dir(tmp_path_factory.mktemp("moe") / "model", head_dim=32))
    opened.engines._pusher._options = WeightsConfig(verify=True)
    yield opened
    opened.engines.close()


def test_logprobs_after_every_push_are_those_of_transformers(direct: Direct) -> None:
    assert direct.loaded == direct.expected(Weights(direct.model)), "each expert's tensors are where vLLM put them"
    assert 0 < largest_error(direct.model, sample(direct.engines)) < PARITY
    for seed in range(2):
        before = sample(direct.engines)
        change(direct.model, seed)
        assert largest_error(direct.model, before) > 1000 * PARITY, "the change is large enough to be seen"
        direct.engines.push(Weights(direct.model), direct.engines.version + 1)
        assert 0 < largest_error(direct.model, sample(direct.engines)) < PARITY, f"push {seed}"


def test_a_complete_push_repairs_a_damaged_one(direct: Direct) -> None:
    change(direct.model, seed=3)

    def flip(index: int, bucket: Bucket, memory: SharedBuffer) -> None:
        if index == 6:
            memory.bytes[bucket.start + bucket.used // 2] ^= 1

    with pytest.raises(DamagedError, match=r"[0-9a-f]{16}.*[0-9a-f]{16}"):
        direct.send(Weights(direct.model), damage=flip)
    with pytest.raises(RunError, match="push 9 failed"):
        sample(direct.engines)
    direct.engines.push(Weights(direct.model), direct.engines.version + 1)
    assert 0 < largest_error(direct.model, sample(direct.engines)) < PARITY


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and a mixture after a few supervised steps."""
    out = tmp_path_factory.mktemp("tiny_moe")
    arguments = ["examples/tiny_cpu/prepare.py", "--out", str(out), "--steps", "20", "--experts", "4"]
    assert call_forked(run_script, 1, arguments, {}).returncode == 0
    return out


@pytest.mark.nightly
def test_a_run_with_experts_on_two_ranks(mixture: Path, tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    options = {
        "model__path": mixture / "model",
        "model__moe_aux_loss_coeff": 0.01,
        "model__moe_z_loss_coeff": 0.001,
        "model__moe_routing_replay": "true",
        "rollout__save": "true",
        "parallel__expert_model_parallel_size": 2,
        "checkpoint__every_steps": 1,
        "weights__verify": "true",
    }
    run_dir = tmp_path / "run"
    for steps, flags in ((STEPS - 1, []), (STEPS, ["--resume"])):
        keys = overrides(run_dir, num_steps=steps, **options)
        result = forked(2, [*keys, *flags])
        assert result.returncode == 0, result.stderr[-3000:]
    logged = records(run_dir)
    assert [step["step"] for step in logged] == list(range(1, STEPS + 1))
    for step in logged:
        assert 0 < step["rollout/logprob_abs_diff"] < 1e-4
        assert step["gradnorm/sq_mean"] > 0 and step["grad_norm"] > 0
        assert 0 <= step["moe/route_mismatch_fraction"] < 0.01, "in fp32 engine and trainer rarely differ"
        assert step["moe/aux_loss"] >= 0.99 and step["moe/z_loss"] > 0 and 1 <= step["moe/max_load"] <= 4
    first, last = (load_file(path / "model.safetensors") for path in (mixture / "model", run_dir / "hf"))
    assert first.keys() == last.keys()
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert all(".experts." in name for name in still), "all weights but those of experts that no token chose have moved"
    assert 2 * len(still) < sum(".experts." in name for name in first)
    check_export(run_dir, tmp_path / "converted")
    keys = overrides(tmp_path / "again", num_steps=STEPS, **options | {"rollout__save": "false"})
    result = forked(2, [*keys, "--replay", str(run_dir / "rollouts")])
    assert result.returncode == 0, result.stderr[-3000:]
    for once, again in zip(logged, records(tmp_path / "again"), strict=True):
        same = ("rollout/logprob_abs_diff", "moe/route_mismatch_fraction", "moe/max_load", "grad_norm")
        assert [once[name] for name in same] == [again[name] for name in same]


@pytest.mark.nightly
def test_routes_reach_the_gradient_in_every_order_of_a_step(
    mixture: Path, tmp_path: Path, overrides: Callable[..., list[str]]
) -> None:
    """Streamed waves, one step off, and batches that dynamic sampling refills train with the routes of a plain step."""
    common = {
        "model__path": mixture / "model",
        "model__moe_routing_replay": "true",
        "parallel__expert_model_parallel_size": 2,
        "algo__baseline": "rloo",
        "rollout__max_num_seqs": 8,
        "optimizer__lr": 0.01,
        "num_steps": 2,
    }
    refills = {"rollout__dynamic_sampling": "true", "group_size": 2}
    stream = {"rollout__overlap": "stream", "rollout__wave_tokens": 16}
    one_step = {"rollout__overlap": "one_step", "rollout__max_staleness": 1}
    runs: dict[str, dict[str, object]] = {
        "plain": {},
        "stream": stream,
        "one_step": one_step,
        "refilled": refills,
        "refilled_stream": refills | stream,
    }
    logged = {}
    for name, keys in runs.items():
        result = forked(2, overrides(tmp_path / name, **common, **keys))
        assert result.returncode == 0, result.stderr[-3000:]
        logged[name] = records(tmp_path / name)
    for name, base in (("stream", "plain"), ("one_step", "plain"), ("refilled_stream", "refilled")):
        once, other = logged[base][0], logged[name][0]
        for metric in ("reward/mean", "loss", "grad_norm", "moe/route_mismatch_fraction", "rollout/logprob_abs_diff"):
            assert other[metric] == pytest.approx(once[metric], rel=1e-4, abs=1e-7), (name, metric)
    assert logged["refilled"][0]["groups/dropped"] > 0, "otherwise no batch was refilled"
    fresh = logged["stream"][1]["moe/route_mismatch_fraction"]
    assert 0 <= fresh < 0.01 < logged["one_step"][1]["moe/route_mismatch_fraction"], "old weights chose other experts"


@pytest.mark.nightly
def test_a_run_of_experts_adapters(mixture: Path, tmp_path: Path, overrides: Callable[..., list[str]]) -> None:
    """Every expert's adapters on two ranks, merged into the pushed weights; the engine has the trainer's log-probs."""
    options = {
        "model__path": mixture / "model",
        "model__lora__rank": 4,
        "parallel__expert_model_parallel_size": 2,
        "optimizer__lr": 0.01,
        "weights__verify": "true",
    }
    result = forked(2, overrides(tmp_path / "run", num_steps=3, **options))
    assert result.returncode == 0, result.stderr[-3000:]
    check_lora_run(tmp_path / "run", mixture / "model")


def check_export(run_dir: Path, converted: Path) -> None:
    """The export holds the last checkpoint's weights; transformers and the oracle compute the same logits with it."""
    result = forked_cli(["convert", "to-hf", str(checkpoints_of(run_dir)[0]), str(converted)])
    assert result.returncode == 0, result.stderr[-3000:]
    exported = load_file(run_dir / "hf" / "model.safetensors")
    again = load_file(converted / "model.safetensors")
    assert exported.keys() == again.keys() and all(torch.equal(exported[name], again[name]) for name in exported)
    tokens = torch.arange(3, 15)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(run_dir / "hf")(tokens[None]).logits[0]
    oracle = oracle_logits(exported, AutoConfig.from_pretrained(run_dir / "hf"), tokens)
    torch.testing.assert_close(logits, oracle, rtol=1e-4, atol=1e-4)
