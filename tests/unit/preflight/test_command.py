"""`train --dry-run` as a user calls it: what it prints, what it refuses, and that it writes nothing.

Not covered: a machine with a GPU without --gpu-memory-gb.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oblr_megatron.cli import main
from oblr_megatron.config import Config
from oblr_megatron.errors import UserError
from oblr_megatron.model.published import published
from oblr_megatron.preflight.device_memory import RankDevice, RankMemory, rank_memory
from oblr_megatron.preflight.examine import check_fits
from tests.tiny import make_hf_dir
from tests.unit.configs import config_with

GPU = RankDevice(on_gpu=True, num_bytes=80 * 10**9, transformer_engine=True)
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
    assert found["world_size"] == 16 and found["parameters_total"] == found["trained_total"] == 596_049_920
    assert [rank["rank"] for rank in found["ranks"]] == list(range(16))
    assert {rank["parameters"] for rank in found["ranks"]} == {298_123_264}  # half of padded weights; norms whole
    fullest = max(max(rank["training_bytes"], rank["rollout_bytes"]) for rank in found["ranks"])
    assert found["max_bytes_per_rank"] == fullest < 80e9
    printed = "\n".join(text)
    assert "published as Qwen3-0.6B" in printed
    assert [line.removeprefix("not checked: ") for line in text if line.startswith("not checked: ")] == found[
        "not_checked"
    ]
    for unchecked in ("GPUs", "models/Qwen3-0.6B-Base", "dapo"):
        assert any(unchecked in line for line in found["not_checked"]), unchecked
    assert "GPU of 80 GB" in printed and "while sampling" in printed and "0-15" in printed
    assert list(config_file.parent.iterdir()) == [config_file]  # no run_dir


def test_on_a_machine_without_gpus(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A complete model directory, and one engine that does not sleep."""
    assert dry(config_file, *complete(config_file.parent)) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert any("each on a CPU" in line for line in text)
    assert f"{config_file.parent / 'model'}: complete" in text
    assert json.loads(last)["not_checked"] == [] and not any(line.startswith("not checked") for line in text)
    assert any(line.startswith("checked: ") for line in text)
    assert not (config_file.parent / "run").exists()


def test_a_run_that_only_samples_needs_no_memory_for_training(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No policy, no optimizer, no norms; 12 prompts on 8 replicas are no reason for a warning."""
    keys = ["num_prompts=12", "algo.snr.estimator=momentum", "parallel.tensor_model_parallel_size=1"]
    keys += ["parallel.sequence_parallel=false"]
    arguments = [*keys, "--nproc-per-node", "8", "--gpu-memory-gb", "24"]
    assert dry(config_file, *arguments) == 2
    assert "its device has 24.0 GB" in capsys.readouterr().err
    assert dry(config_file, *arguments, "--rollout-only") == 0
    printed = capsys.readouterr().out
    (rank,) = {(one["training_bytes"], one["rollout_bytes"]) for one in json.loads(printed.splitlines()[-1])["ranks"]}
    assert rank == (4 * 2**30, 2 * 2**30 + 12_000_000_000), "the trainer's CUDA context and the engine"
    assert not any(word in printed for word in ("norms:", "idle", "while training"))


def test_golds_that_no_response_equals_are_warned_of(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answers of GSM8K's raw rows are whole solutions. Both dry runs warn: here, and for other machines."""
    keys = complete(config_file.parent)
    rows = config_file.parent / "rows.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"question": "t3 t4", "answer": "2+3=5.\n#### 5"}) + "\n")
    for elsewhere in ([], ["--gpu-memory-gb", "80", "rollout.quantization=none"]):
        assert dry(config_file, *keys, "reward.name=exact_match", *elsewhere) == 0
        warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == 1 and f"{rows}: 1 of 2 golds" in warnings[0] and '"gsm8k"' in warnings[0]


def test_a_dry_run_warns_of_what_was_given_alone(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of the norms' mode that it has chosen itself."""
    keys = complete(config_file.parent)
    for given, count in (([], 0), (["gradnorm.mode=two_pass"], 1)):
        assert dry(config_file, *keys, "algo.preset=rloo", *given) == 0
        assert capsys.readouterr().out.count("warning: gradnorm.mode has no effect") == count


def complete(root: Path) -> list[str]:
    """Arguments of a run that this machine can start; its model and rows are written below `root`."""
    model = make_hf_dir(root / "model", head_dim=32)
    (root / "rows.jsonl").write_text('{"question": "t2 t3", "answer": "t4"}\n')
    keys = {
        "model.path": model,
        "model.dtype": "float32",
        "data.train": root / "rows.jsonl",
        "data.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 16,
        "rollout.kv_cache_gib": 0.1,
        "checkpoint.every_steps": 0,
    }
    return ["--nproc-per-node", "2", *(f"{key}={value}" for key, value in keys.items())]


def _no_weights(root: Path) -> list[str]:
    (root / "model" / "model.safetensors").unlink()
    return []


def _broken_tokenizer(root: Path) -> list[str]:
    tokenizer = root / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:-100])
    return []


def _two_ropes(root: Path) -> list[str]:
    """transformers reads rope_scaling."""
    path = root / "model" / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    return []


def _rows(text: str) -> Callable[[Path], list[str]]:
    def write(root: Path) -> list[str]:
        (root / "rows.jsonl").write_text(text)
        return []

    return write


def _used(root: Path) -> list[str]:
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").write_text("{}\n")
    return []


def _key(key: str) -> Callable[[Path], list[str]]:
    return lambda root: [key.format(root=root)]


REFUSED_HERE: dict[str, tuple[Callable[[Path], list[str]], str, bool]] = {
    "data that are missing": (_key("data.train={root}/none.jsonl"), "none.jsonl", False),
    "data without a row": (_rows(""), "rows.jsonl", True),
    "bad rows alone": (_rows('{"question": "t2"}\nnone\n'), "rows.jsonl", True),
    "held-out rows that are missing": (_key("evaluate.data.a={root}/none.jsonl"), "none.jsonl", False),
    "saved samples that are missing": (_key("rollout.replay={root}/none"), "none", False),
    "a server that is down": (_key("rollout.servers=http://127.0.0.1:1"), "http://127.0.0.1:1", False),
    "no weights": (_no_weights, "model", False),
    "a broken tokenizer": (_broken_tokenizer, "model", True),
    "two kinds of positions": (_two_ropes, "model", True),
    "a run_dir in use": (_used, "run", True),
    "an unwritable run_dir": (_key("run_dir={root}/rows.jsonl/run"), "rows.jsonl", False),
}
"""What to break, what the error names, and whether a dry run for other machines refuses it, too."""


@pytest.mark.parametrize("case", REFUSED_HERE)
def test_a_dry_run_refuses_what_the_run_refuses(
    case: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = config_file.parent
    arguments = complete(root)
    edit, named, elsewhere = REFUSED_HERE[case]
    arguments += edit(root)
    before = sorted(root.rglob("*"))
    assert dry(config_file, *arguments) == 2
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and named in errors[0], said
    assert dry(config_file, *arguments, "--nnodes", "1") == (2 if elsewhere else 0)
    if not elsewhere:
        unchecked = json.loads(capsys.readouterr().out.splitlines()[-1])["not_checked"]
        assert any(named in line for line in unchecked), unchecked
    assert sorted(root.rglob("*")) == before


REFUSED = {
    "ranks that do not divide": (["--nproc-per-node", "3"], "3 ranks cannot be divided into model replicas"),
    "folds that do not divide": (["--nproc-per-node", "8", "algo.snr.num_folds=2"], "2 folds are not a multiple"),
    "rows that the reward cannot score": (
        ["--nproc-per-node", "8", "reward.name=reasoning_gym"],
        "cannot score the rows of 'dapo'",
    ),
    "an engine over nodes": (["--nproc-per-node", "2", "rollout.tensor_parallel_size=4"], "do not fit 2 ranks"),
    "heads over an engine": (["--nproc-per-node", "6", "rollout.tensor_parallel_size=3"], "num_attention_heads 16"),
    "key heads over an engine": (
        ["--nproc-per-node", "14", "model.path=models/Qwen2.5-7B", "rollout.tensor_parallel_size=7"],
        "num_key_value_heads 4 and rollout.tensor_parallel_size 7",
    ),
    "too little memory": (["--nproc-per-node", "8", "--gpu-memory-gb", "12"], "its device has 12.0 GB"),
    "no room for a cache": (
        ["--nproc-per-node", "8", "rollout.gpu_memory_utilization=0.05"],
        "KV cache holds 0 tokens",
    ),
    "a model of another name": (["model.path=models/Other-1B"], "no published model is named 'Other-1B'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = REFUSED[case]
    memory = [] if "--gpu-memory-gb" in arguments else ["--gpu-memory-gb", "80"]
    assert dry(config_file, *arguments, *memory) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and expected in error


def run(**sections: Any) -> Config:
    return config_with(**{"model": {"dtype": "bfloat16"}} | sections)


def memory(config: Config, world_size: int = 8) -> RankMemory:
    return rank_memory(published("1.7B"), config, world_size, GPU)[0]


def test_trainer_and_engine_take_turns() -> None:
    """A sleeping engine leaves its memory to the trainer; level 0 keeps it, and servers take none."""
    asleep, awake, elsewhere = (
        memory(run(rollout=rollout)) for rollout in ({}, {"sleep_level": 0}, {"servers": ["http://localhost:1"]})
    )
    assert asleep.engine is not None and awake.engine is not None and elsewhere.engine is None
    assert awake.training - asleep.training == asleep.engine.total - asleep.engine.asleep(2) > 30e9
    assert asleep.rollout == asleep.step.between_steps + asleep.context + asleep.push + 40_000_000_000
    assert awake.rollout == asleep.rollout + asleep.step.main_grad
    assert asleep.push == 2 * 151936 * 2048 * 2 and elsewhere.push == 0  # the embedding: buffer, contiguous
    cut = memory(run(parallel={"tensor_model_parallel_size": 2}))
    assert cut.push == asleep.push + 152064 * 2048 * 2, "and gathered with its padding, where ranks share it"
    buckets = 2 * 151936 * 2048 * 2  # of pushes to servers, as large as the embedding
    assert elsewhere.training == asleep.training - asleep.engine.asleep(2) + buckets
    assert elsewhere.rollout < awake.rollout - 39e9
    assert asleep.peak == max(asleep.training, asleep.rollout)
    assert sum(asleep.parts().values()) == asleep.training + asleep.rollout - asleep.context


@pytest.mark.parametrize("engines", [None, 2])
def test_ranks_of_a_cpu_share_its_engines(engines: int | None) -> None:
    """The memory of all ranks together is that of their steps and of the engines that are started."""
    cpu = RankDevice(on_gpu=False, num_bytes=None, transformer_engine=False)
    found = rank_memory(published("1.7B"), run(rollout={"num_engines": engines}), 4, cpu)[0]
    assert found.engine is not None
    assert 4 * found.training == pytest.approx(4 * found.step.total + (engines or 1) * found.engine.total, abs=4)
    assert 4 * found.rollout == pytest.approx(4 * found.step.between_steps + (engines or 1) * found.engine.total, abs=4)
    assert sum(found.parts().values()) == pytest.approx(found.training + found.rollout, abs=4)


@pytest.mark.parametrize("device", [GPU, RankDevice(on_gpu=False, num_bytes=None, transformer_engine=False)])
def test_an_engines_cache_holds_the_longest_evaluated_sequence(device: RankDevice) -> None:
    """vLLM refuses to start if one sequence of max_model_len tokens does not fit."""
    rollout = {"max_response_tokens": 1000, "gpu_memory_utilization": 0.2, "kv_cache_gib": 1.0}
    for response, fits in ((2000, True), (10**6, False)):
        config = run(rollout=rollout, evaluate={"max_response_tokens": response})
        ranks = rank_memory(published("1.7B"), config, 8, device)
        if fits:
            check_fits(ranks, config, device)
            continue
        with pytest.raises(UserError, match="one sequence has up to 1,001,024"):
            check_fits(ranks, config, device)


def test_an_error_about_memory_names_the_phase() -> None:
    config = run(rollout={"gpu_memory_utilization": 0.9}, parallel={"recompute_granularity": "full"})
    with pytest.raises(UserError, match=r"during sampling.* 80\.0 GB"):
        check_fits([memory(config)], config, GPU)
    config = run(parallel={"micro_batch_tokens": 65536}, rollout={"max_response_tokens": 16384})
    with pytest.raises(UserError, match="at the last norm's backward"):
        check_fits([memory(config)], config, GPU)


def test_a_cache_that_is_too_large_for_a_cpu_is_named(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(config_file, *complete(tmp_path), "rollout.kv_cache_gib=100000") == 2
    assert "lower rollout.kv_cache_gib" in capsys.readouterr().err
