"""`train --dry-run` as a user calls it: what it prints, what it refuses, and that it writes nothing.

Not covered: a machine with a GPU without --gpu-memory-gb.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.cli import main
from oblr_megatron.config import Config, parse_config
from oblr_megatron.dryrun.checking import check_fits
from oblr_megatron.dryrun.device_memory import Device, RankMemory, rank_memory
from oblr_megatron.errors import UserError
from oblr_megatron.model.published import published
from tests.tiny import make_hf_dir

GPU = Device(on_gpu=True, num_bytes=80 * 10**9, transformer_engine=True)
CONFIG = """
run_dir = "{directory}/run"
num_prompts = 8
group_size = 4
[model]
path = "models/Qwen3-0.6B-Base"
dtype = "bfloat16"
[data]
train = "dapo"
[reward]
name = "math"
[algo.snr]
num_folds = 8
[parallel]
tensor_model_parallel_size = 2
sequence_parallel = true
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(directory=tmp_path), encoding="utf-8")
    return file


def dry(file: Path, *arguments: str) -> int:
    return main(["train", str(file), "--dry-run", *arguments])


def test_a_table_and_a_line_of_json(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(config_file, "--nnodes", "2", "--nproc-per-node", "8", "--gpu-memory-gb", "80") == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["world_size"] == 16 and found["parameters_total"] == 596_049_920
    assert [rank["rank"] for rank in found["ranks"]] == list(range(16))
    assert {rank["parameters"] for rank in found["ranks"]} == {298_123_264}  # half of padded weights; norms whole
    fullest = max(max(rank["training_bytes"], rank["rollout_bytes"]) for rank in found["ranks"])
    assert found["max_bytes_per_rank"] == fullest < 80e9
    printed = "\n".join(text)
    assert "published as Qwen3-0.6B" in printed and "not on this machine: data dapo" in printed
    assert "GPU of 80 GB" in printed and "while sampling" in printed and "0-15" in printed
    assert list(config_file.parent.iterdir()) == [config_file]  # no run_dir


def test_on_a_machine_without_gpus(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A complete model directory, and one engine that does not sleep."""
    model = make_hf_dir(config_file.parent / "model")
    short = ["rollout.max_response_tokens=64", "data.max_prompt_tokens=64", "evaluate.max_response_tokens=64"]
    assert dry(config_file, "--nproc-per-node", "2", f"model.path={model}", "rollout.kv_cache_gib=0.1", *short) == 0
    printed = capsys.readouterr().out
    assert "each on a CPU" in printed and f"{model}: complete" in printed


REFUSED = {
    "ranks that do not divide": (["--nproc-per-node", "3"], "3 ranks cannot be divided into model replicas"),
    "folds that do not divide": (["--nproc-per-node", "8", "algo.snr.num_folds=2"], "num_folds 2 is not a multiple"),
    "an engine over nodes": (["--nproc-per-node", "2", "rollout.tensor_parallel_size=4"], "do not fit 2 ranks"),
    "heads over an engine": (["--nproc-per-node", "6", "rollout.tensor_parallel_size=3"], "num_attention_heads 16"),
    "too little memory": (["--nproc-per-node", "8", "--gpu-memory-gb", "16"], "its device has 16.0 GB"),
    "no room for a cache": (
        ["--nproc-per-node", "8", "rollout.gpu_memory_utilization=0.05"],
        "KV cache holds 0 tokens",
    ),
    "a model of another name": (["model.path=models/Other-1B"], "no published Qwen3 model is named 'Other-1B'"),
    "no ranks": (["--nproc-per-node", "0"], "--nproc-per-node 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = REFUSED[case]
    memory = [] if "--gpu-memory-gb" in arguments else ["--gpu-memory-gb", "80"]
    assert dry(config_file, *arguments, *memory) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and expected in error


def test_its_flags_need_dry_run(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config_file), "--nnodes", "2"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def run(**sections: Any) -> Config:
    table = {"run_dir": "unused", "model": {"path": "unused", "dtype": "bfloat16"}, "data": {"train": "unused"}}
    return parse_config(table | sections)


def memory(config: Config, world_size: int = 8) -> RankMemory:
    return rank_memory(published("1.7B"), config, world_size, GPU)[0]


def test_trainer_and_engine_take_turns() -> None:
    """A sleeping engine leaves its memory to the trainer; level 0 keeps it, and servers take none."""
    asleep, awake, elsewhere = (
        memory(run(rollout=rollout)) for rollout in ({}, {"sleep_level": 0}, {"servers": ["http://localhost:1"]})
    )
    assert asleep.engine is not None and awake.engine is not None and elsewhere.engine is None
    assert awake.training - asleep.training == asleep.engine.total - asleep.engine.asleep(2) > 30e9
    assert awake.rollout == asleep.rollout == asleep.step.between_steps + asleep.context + 40_000_000_000
    assert elsewhere.training == asleep.training - asleep.engine.asleep(2) and elsewhere.rollout < asleep.rollout - 39e9
    assert asleep.peak == max(asleep.training, asleep.rollout)
    assert sum(asleep.parts().values()) == asleep.training + asleep.rollout - asleep.context


def test_an_error_about_memory_names_the_phase() -> None:
    config = run(rollout={"gpu_memory_utilization": 0.9}, parallel={"recompute_granularity": "full"})
    with pytest.raises(UserError, match=r"during sampling.* 80\.0 GB"):
        check_fits([memory(config)], config, GPU)
    config = run(parallel={"micro_batch_tokens": 65536}, rollout={"max_response_tokens": 16384})
    with pytest.raises(UserError, match="at the loss"):
        check_fits([memory(config)], config, GPU)
