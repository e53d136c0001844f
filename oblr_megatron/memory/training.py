"""Predicted peak memory of a training step on its fullest rank. Imports no torch.

    memory = estimate(hf_config, config, world_size)
    memory.total, memory.table()

A rank holds for the whole step: weights, `main_grad` and optimizer state (with `model.lora` those of the adapters), and
the buffers of mode "stash". The largest of these moments is added: loss, backward of the output layer, backward of the
last layer, end of a pass, optimizer update.

All samples count as long as the configuration allows. The distributed optimizer divides its state by the ranks that
hold copies of a weight. FP8 copies of a weight take two bytes, because its transpose is kept too. Between steps
`main_grad` and the stash buffers are freed if engines take turns on the same GPUs. Optimizer state that is offloaded
counts during the update only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oblr_megatron.config import Config
from oblr_megatron.formatting import size
from oblr_megatron.memory.pass_plan import Layout, folds_of_a_rank, lengths_that_fill, passes_of
from oblr_megatron.memory.peak import PassOnRank, update_moment
from oblr_megatron.memory.rank_shapes import ELEMENT_BYTES, RankSizes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank at its peak.

    Example, two layers of Qwen3-0.6B in fp32 with 512 tokens, in MiB:
        MemoryEstimate(weights=136, main_grad=136, fold_sums=0, optimizer=272, activations=118, logits=20,
                       norms=544, work=34, checkpoint=0, fixed=474, stage=0, moment="last layer's backward")
    """

    weights: int  # with the reference model of a KL penalty and with FP8 copies
    main_grad: int
    fold_sums: int  # the sum over folds, if a rank has several; with rollout.overlap "stream" the sum of each fold
    optimizer: int  # moments, fp32 masters of bf16 weights, the gradient average of the "momentum" estimator
    activations: int  # of the microbatches in flight
    logits: int  # with their softmax and gradient
    norms: int  # stashed gradients, factors or partial sums kept for the norms
    work: int  # temporary memory of the moment
    checkpoint: int  # the copy that is being written; 0 on a GPU, where it is in host memory
    fixed: int  # the process without a model
    stage: int  # pipeline stage of this rank
    moment: str
    between_steps: int = 0  # held during sampling; the maximum over stages

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(num_bytes for _, num_bytes in self.rows())

    def rows(self) -> list[tuple[str, int]]:
        """(part, bytes), in the order of the fields."""
        names = [field.name for field in fields(self)]
        return [(name.replace("_", " "), getattr(self, name)) for name in names[: names.index("stage")]]

    def table(self) -> str:
        """One line, e.g. "1.7 GiB on the fullest rank, at the loss: weights 136 MiB, main grad 136 MiB, ..."."""
        parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in self.rows() if num_bytes)
        return f"{size(self.total)} on the fullest rank, at the {self.moment}: {parts}"


def estimate(
    hf_config: Mapping[str, Any],
    config: Config,
    world_size: int,
    *,
    on_gpu: bool = False,
    transformer_engine: bool = False,
    fixed_bytes: int | None = None,
) -> MemoryEstimate:
    """The memory of a training step on its fullest rank.

    Args:
        hf_config: the model's config.json, checked against the layout (`checks.layout.check_layout`).
        config: the run; `gradnorm.mode` "auto" counts as "two_pass".
        world_size: ranks of the run.
        on_gpu: whether kernels are CUDA's; then memory means the memory of CUDA's allocator.
        transformer_engine: whether the layers are Transformer Engine's.
        fixed_bytes: of the process without a model; by default its resident memory now, or 0 on a GPU.
    """
    if fixed_bytes is None:
        fixed_bytes = 0 if on_gpu else resident_bytes()
    stages = [
        estimate_stage(
            hf_config,
            config,
            world_size,
            stage,
            on_gpu=on_gpu,
            transformer_engine=transformer_engine,
            fixed_bytes=fixed_bytes,
        )
        for stage in range(config.parallel.pipeline_model_parallel_size)
    ]
    fullest = max(stages, key=lambda candidate: candidate.total)
    return replace(fullest, between_steps=max(candidate.between_steps for candidate in stages))


def estimate_stage(
    hf_config: Mapping[str, Any],
    config: Config,
    world_size: int,
    stage: int,
    *,
    on_gpu: bool,
    transformer_engine: bool,
    fixed_bytes: int,
) -> MemoryEstimate:
    """The memory of a training step on a rank of one pipeline stage."""
    layout = Layout.of(hf_config, config, world_size)
    sizes = RankSizes.of(hf_config, config, stage, on_gpu=on_gpu, transformer_engine=transformer_engine)
    updated = updated_elements(sizes, config, world_size)
    moments, gathered = [update_moment(sizes, config, updated, on_gpu=on_gpu)], 0
    norms = config.measures_norms or config.compares_norms
    of_passes = {"norms": norms, "transformer_engine": transformer_engine}
    for length in lengths_that_fill(config):
        for run in passes_of(hf_config, config, layout, length, **of_passes):
            on_rank = PassOnRank(sizes, config, run, sizes.tokens(run.rows, length), stage, on_gpu)
            moments += [replace(moment, in_folds=run.kind != "norms") for moment in on_rank.moments()]
            gathered = max(gathered, on_rank.gathered)

    weights = (sizes.parameters + sizes.adapter_parameters) * sizes.element
    main_grad = sum(sizes.trained) * sizes.wide
    fp8_copies = 2 * sizes.layer_weights if config.model.fp8 != "none" else 0  # of the matrices and their transposes
    copied = config.algo.kl_coefficient > 0 and not sizes.adapter_rank  # the reference of adapters is the model itself
    held_weights = weights * (2 if copied else 1) + fp8_copies
    folds, streams = folds_of_a_rank(config, layout), config.rollout.overlap == "stream"
    fold_sums = main_grad * (folds if streams else int(folds > 1))  # when streaming, held in all passes of a step
    optimizer = optimizer_bytes(config, updated)
    in_passes = optimizer - (offloaded_bytes(config, updated) if on_gpu else 0)
    stash = config.stash_size * main_grad if config.stashes else 0
    kept_gradients = 0 if on_gpu and config.rollout.takes_turns else main_grad + stash
    saves = config.checkpoint  # steps run while a copy of the state is written; data-parallel ranks share the writing
    during = 0 < saves.every_steps < config.num_steps or saves.best_metric
    copies = saves.async_save and during and not on_gpu
    at_moments = [
        MemoryEstimate(
            weights=held_weights,
            main_grad=main_grad,
            fold_sums=fold_sums if moment.in_folds or (streams and not moment.updates) else 0,
            optimizer=optimizer if moment.updates else in_passes,
            activations=moment.activations,
            logits=moment.logits,
            norms=moment.norms + stash,
            work=moment.work,
            checkpoint=sum(sizes.trained) * sizes.element + optimizer if copies else 0,
            fixed=fixed_bytes,
            stage=stage,
            moment=moment.name,
            between_steps=held_weights + in_passes + kept_gradients + gathered + fixed_bytes,
        )
        for moment in moments
    ]
    return max(at_moments, key=lambda candidate: candidate.total)


def updated_elements(sizes: RankSizes, config: Config, world_size: int) -> int:
    """Elements of the weights of which a rank holds optimizer state.

    The distributed optimizer divides weights over the data- and context-parallel ranks, and experts over fewer ranks.
    """
    parallel, (dense, experts) = config.parallel, sizes.trained
    if not parallel.use_distributed_optimizer:
        return dense + experts
    stage = world_size // parallel.pipeline_model_parallel_size
    holders = stage // sizes.tp
    of_expert = max(1, stage // (parallel.expert_model_parallel_size * sizes.etp))
    return -(-dense // holders) + -(-experts // of_expert)


def optimizer_bytes(config: Config, updated: int) -> int:
    """Bytes of Adam's two moments or SGD's momentum, fp32 masters, and the "momentum" estimator's gradient average."""
    average = updated * (config.algo.snr.estimator == "momentum")  # cut like the moments (`model.momentum`)
    return state_bytes(config, updated) + average * max(ELEMENT_BYTES[config.model.dtype], 4)


def state_bytes(config: Config, updated: int) -> int:
    """Bytes of the optimizer's moments and fp32 masters."""
    copies = 2 if config.optimizer.name == "adam" else int(config.optimizer.keeps_moments)
    element = ELEMENT_BYTES[config.model.dtype]
    return updated * (copies + int(element < 4)) * max(element, 4)


def offloaded_bytes(config: Config, updated: int) -> int:
    """Bytes of the state that a GPU rank keeps in host memory between updates (`optimizer.offload`)."""
    return state_bytes(config, updated) if config.optimizer.offload == "sampling" else 0


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it (not Linux)."""
    return kernel_bytes("/proc/self/status", "VmRSS") or 0


def kernel_bytes(file: str, field: str) -> int | None:
    """A field that the kernel reports in kB; None if it does not (not Linux)."""
    try:
        text = Path(file).read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
