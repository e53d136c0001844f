"""The layout presets of slurm/configs: each divides and fits, at its own size and at 1,024 ranks.

`make test-all` also builds each preset's model on the meta device. Not covered: a run of any preset.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import load_config
from oblr_megatron.errors import UserError
from oblr_megatron.model.published import NAMES
from oblr_megatron.observe.performance.flops import total_parameters
from oblr_megatron.preflight.device_memory import rank_memory
from oblr_megatron.preflight.examine import check_fits, check_run, model_of
from tools.dry_run_presets import DEVICE, PER_NODE, PRESETS, at_size, examined, nodes_of

ALL = sorted(path.stem for path in PRESETS.glob("*.toml"))
LARGE = "qwen3_235b_a22b"
NODES = 128


def preset(name: str) -> Path:
    return PRESETS / f"{name}.toml"


def test_there_is_one_for_every_size() -> None:
    assert sorted(letters(name) for name in NAMES) == sorted(letters(name) for name in ALL)


def at_least_7b(name: str) -> bool:
    return float(re.findall(r"_(\d+(?:\.\d+)?)b", name)[0]) >= 7


def letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


@pytest.mark.parametrize("name", ALL)
def test_its_first_lines_say_how_to_run_and_check_it(name: str) -> None:
    first, second, *_ = preset(name).read_text(encoding="utf-8").splitlines()
    assert first.endswith(f": sbatch slurm/oblr_{name}.sh")
    assert second.endswith(
        f"oblr-megatron train slurm/configs/{name}.toml --dry-run --nnodes {nodes_of(preset(name))} "
        f"--nproc-per-node {PER_NODE} --gpu-memory-gb 80"
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("nodes", [0, NODES])
def test_it_fits(name: str, nodes: int) -> None:
    """At its own size (as it stands, without larger folds) and on 128 nodes; norms in the gradient's pass if dense."""
    own = nodes_of(preset(name))
    config = at_size(preset(name), nodes) if nodes else load_config(preset(name))
    hf_config, _ = model_of(config.model.path)
    decided = check_run(hf_config, config, (nodes or own) * PER_NODE, PER_NODE, DEVICE)
    assert (config.algo.baseline, config.algo.schedule) == ("pooled", "constant"), "the default recipe"
    assert decided.gradnorm.mode == ("two_pass" if num_experts(hf_config) else "inline")
    check_fits(rank_memory(hf_config, decided, (nodes or own) * PER_NODE, DEVICE), decided, DEVICE)


@pytest.mark.parametrize(("name", "folds"), [(name, 4 if "14b" in name else 2) for name in ALL if at_least_7b(name)])
def test_a_streaming_run_fits_with_the_folds_of_the_docs(name: str, folds: int) -> None:
    """docs/cluster.md, "Servers on separate nodes": with the presets' 8 folds these runs are refused."""
    for keys in ([], [f"algo.snr.num_folds={folds}"]):
        overrides = ['rollout.servers=["http://host:1"]', "rollout.overlap=stream", *keys]
        config, ranks = load_config(preset(name), overrides), nodes_of(preset(name)) * PER_NODE
        hf_config, _ = model_of(config.model.path)
        decided = check_run(hf_config, config, ranks, PER_NODE, DEVICE)
        memory = rank_memory(hf_config, decided, ranks, DEVICE)
        if keys:
            check_fits(memory, decided, DEVICE)
            continue
        with pytest.raises(UserError, match="num_folds to the number of replicas"):
            check_fits(memory, decided, DEVICE)


def adapted() -> list[str]:
    """docs/lora.md's job scripts with their arguments."""
    text = (PRESETS.parents[1] / "docs" / "lora.md").read_text(encoding="utf-8")
    return re.findall(r"^sbatch (.+?)(?: +#.*)?$", text, re.MULTILINE)


@pytest.mark.parametrize("command", adapted())
def test_adapters_fit_one_node(command: str) -> None:
    """With the keys that the job script adds to its preset, and on its GPUs."""
    *_, script, arguments = re.split(r"(slurm/\S+)", command)
    text = (PRESETS.parents[1] / script).read_text(encoding="utf-8")
    keys = [*re.findall(r"^    (\w+(?:\.\w+)*=\S+)$", text, re.MULTILINE), *arguments.split()]
    gpus = int(re.findall(r"gpus-per-node=(\d+)", text)[0])
    config = load_config(re.findall(r"slurm/configs/\S+\.toml", text)[0], keys)
    hf_config, _ = model_of(config.model.path)
    decided = check_run(hf_config, config, gpus, gpus, DEVICE)
    assert decided.model.lora.rank == 16
    check_fits(rank_memory(hf_config, decided, gpus, DEVICE), decided, DEVICE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in ALL if name != LARGE])
def test_its_ranks_hold_the_model(name: str) -> None:
    check_models(name, nodes_of(preset(name)))


@pytest.mark.nightly
def test_the_largest_at_1024_ranks() -> None:
    check_models(LARGE, NODES)


def check_models(name: str, nodes: int) -> None:
    found = examined(preset(name), nodes).found
    hf_config, _ = model_of(found.config.model.path)
    assert found.models.total == total_parameters(hf_config)
    assert sorted(rank for held in found.models.holdings for rank in held.ranks) == list(range(nodes * PER_NODE))
