"""Choice of `gradnorm.mode` "auto", and refusal of impossible modes. Imports no torch.

Modes are compared by the time they add to a plain step, as a share of it. With T tokens per sample and a linear layer
[p, d]:

    inline      r' / 3             r' = min(r, squares of the product / its FLOPs): 0 for long samples
    bookkeep    r / 3              r = min(1, T (p + d) / (2 p d)): FLOPs of the norm over those of dy^T x, which is
                                   a third of the step
    stash       B beta / (6 T)     B bytes moved per weight and sample, beta FLOPs of the machine per byte moved
    two_pass    (2 + r) / 3        forward and input gradients once more, of the share `gradnorm.sample_fraction`

With adapters (`model.lora`) a step is 2 / 3 of that, because W has no gradient, and a second pass costs a whole step.
The rest shrinks by s = parameters of the adapters / those of the model; bookkeep forms all products twice and keeps as
many factors as for W, 4 s. "stash" comes last if microbatches could hold several samples, because its own hold one.

The pipeline bubble adds (pp - 1) / m with m microbatches between flushes. These numbers only rank the modes;
docs/results.md has measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oblr_megatron.checks.layout import num_experts
from oblr_megatron.config import Config
from oblr_megatron.config.norm_modes import mode_problem
from oblr_megatron.errors import Problem, UserError
from oblr_megatron.families import head_dim
from oblr_megatron.formatting import size
from oblr_megatron.memory.engine import outside_training
from oblr_megatron.memory.pass_plan import Layout, longest_sample, passes_of
from oblr_megatron.memory.rank_shapes import RankSizes
from oblr_megatron.memory.training import MemoryEstimate, estimate, kernel_bytes

MODES = ("inline", "bookkeep", "stash", "two_pass")
BYTES_MOVED = 16  # per stashed fp32 element: written, squared, read again, added to main_grad
SQUARED_FLOPS = 64.0
"""Cost of squaring and adding one entry of a product, in FLOPs, divided by the 2 FLOPs per token that form it."""
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
"""Files of a cgroup with its limit and its use, and the line of memory.stat with caches that can be dropped."""
FLOPS_A_BYTE = {False: 10.0, True: 140.0}  # a CPU core; an H100 in bf16 at the rate of training


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode in which a run computes its norms.

    Example: ModeChoice("stash", "expected 1.01x a plain step at 2064 tokens (bookkeep 1.33x, ...)", 1.01, estimate)
    """

    mode: str
    reason: str  # one line
    cost: float  # expected time of a step over that of a plain step
    estimate: MemoryEstimate


def resolve(
    hf_config: Mapping[str, Any],
    config: Config,
    world_size: int,
    *,
    free_bytes: int | None = None,
    on_gpu: bool = False,
    transformer_engine: bool = False,
) -> ModeChoice:
    """Choose the norm mode of a run.

    Args:
        hf_config: the model's config.json, checked against the layout (`checks.layout.check_layout`).
        config: the run.
        world_size: its ranks.
        free_bytes: memory that a rank and its part of the engines may use, on a GPU all of it. None means unknown:
            everything fits.
        on_gpu: whether ranks have GPUs.
        transformer_engine: whether the layers are Transformer Engine's.

    Raises:
        UserError: the configured mode is impossible in this layout or does not fit.
    """
    asked = config.gradnorm.mode
    if free_bytes is not None:
        free_bytes -= outside_training(hf_config, config, world_size, free_bytes, on_gpu=on_gpu)
        free_bytes = max(0, free_bytes)

    modes = MODES if asked == "auto" else (asked,)
    if not config.measures_norms:
        modes = ("two_pass",) if asked == "auto" else (asked,)
    elif free_bytes is not None:
        modes = tuple(dict.fromkeys((*modes, "two_pass")))  # `_too_large` names it
    runs = {mode: with_mode(config, mode) for mode in modes}
    estimates = {
        mode: estimate(hf_config, run, world_size, on_gpu=on_gpu, transformer_engine=transformer_engine)
        for mode, run in runs.items()
    }
    layout = Layout.of(hf_config, config, world_size)
    if not config.measures_norms:
        apart = mode_problem(config, "two_pass", block=layout.block)
        if apart is not None:
            raise UserError(apart[0], where="config: gradnorm.check_every", fix=apart[1])
        return ModeChoice(modes[0], "unused: this run measures no norms in backward passes", 1.0, estimates[modes[0]])
    problems = {
        mode: mode_problem(run, mode, block=layout.block) or _too_large(run, estimates, free_bytes)
        for mode, run in runs.items()
    }
    if problem := problems.get(asked):
        raise UserError(f"mode {asked!r}: {problem[0]}", where="config: gradnorm.mode", fix=problem[1])
    costs = {
        mode: _cost(hf_config, run, layout, mode, on_gpu=on_gpu) for mode, run in runs.items() if problems[mode] is None
    }
    if asked != "auto":
        return ModeChoice(asked, "as configured", costs[asked], estimates[asked])
    none = problems["two_pass"]
    if not costs and none is not None:
        raise UserError(f"no mode measures norms here: {none[0]}", where="config: gradnorm", fix=none[1])
    best = min(costs, key=costs.__getitem__)
    return ModeChoice(best, _reason(best, costs, problems, longest_sample(config)), costs[best], estimates[best])


def free_memory(local_ranks: int) -> int | None:
    """What the system and the cgroups have left, divided by the ranks of this machine, bytes; None if unknown."""
    known = [left for left in (kernel_bytes("/proc/meminfo", "MemAvailable"), cgroup_left()) if left is not None]
    return min(known) // local_ranks if known else None


def cgroup_left(root: Path = Path("/")) -> int | None:
    """Bytes that the limits of this process's cgroups leave, with file caches that can be dropped; None: no limit.

    Args:
        root: the file system, with /proc and /sys.
    """
    lefts = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit_file, use_file, cache) = ("memory", V1) if controllers else ("", V2)
        own = root / "sys/fs/cgroup" / top / path.lstrip("/")  # a container may show only the directories above
        for directory in (own, *own.parents):
            limit, used = _text(directory / limit_file).strip(), _text(directory / use_file).strip()
            if limit.isdecimal() and used.isdecimal():  # not "max"
                fields = dict(row.split() for row in _text(directory / "memory.stat").splitlines())
                lefts.append(max(0, int(limit) - int(used) + int(fields.get(cache, 0))))
    return min(lefts, default=None)


def _text(file: Path) -> str:
    """The content of a kernel's file; "" if there is none."""
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""


def _too_large(config: Config, estimates: Mapping[str, MemoryEstimate], free_bytes: int | None) -> Problem | None:
    """Why the mode does not fit into memory; None if it does or if memory is unknown.

    Also None for "inline" and "two_pass". They keep nothing for the norms, and need less if samples are short.
    """
    mode, own = config.gradnorm.mode, estimates[config.gradnorm.mode]
    if free_bytes is None or own.total <= free_bytes or mode in ("inline", "two_pass"):
        return None
    what = f"a rank needs {size(own.total)}, but {size(free_bytes)} are free; "
    less = "use mode two_pass"
    if estimates["two_pass"].total >= own.total:  # its microbatches have several samples
        less = f"lower parallel.micro_batch_tokens and {less}"
    if mode == "stash":
        return what + f"{config.stash_size} stashed gradients take {size(own.norms)}", less
    what += f"the factors of {config.gradnorm.window_tokens} tokens (at least one prompt) take {size(own.norms)}"
    return what, f"lower gradnorm.window_tokens, or {less}"


def _cost(hf_config: Mapping[str, Any], config: Config, layout: Layout, mode: str, *, on_gpu: bool) -> float:
    """Expected time of a step, in units of a plain step without a pipeline."""
    tokens = longest_sample(config)
    run = passes_of(hf_config, config, layout, tokens, norms=True, transformer_engine=False)[0]
    bubble = (config.parallel.pipeline_model_parallel_size - 1) / run.microbatches
    ratio = norm_over_product(hf_config, tokens)
    moved = BYTES_MOVED * FLOPS_A_BYTE[on_gpu] / (6 * tokens)
    if config.model.lora.rank:
        sizes = RankSizes.of(hf_config, config, stage=0)
        share = sizes.adapter_parameters / sizes.parameters
        alone = config.parallel.micro_batch_tokens < 2 * tokens
        added = {
            "inline": share * min(1.0, SQUARED_FLOPS / tokens) / 3,
            "bookkeep": 4 * share,
            "stash": moved * share if alone else 4 * share + moved,
            "two_pass": config.gradnorm.sample_fraction,
        }[mode]
        return 1 + added + bubble * (2 if mode == "two_pass" else 1)
    added = {
        "inline": min(ratio, SQUARED_FLOPS / tokens) / 3,
        "bookkeep": ratio / 3,
        "stash": moved,
        "two_pass": (2 + ratio) / 3 * config.gradnorm.sample_fraction,
    }[mode]
    return 1 + added + bubble * (2 if mode == "two_pass" else 1)


def norm_over_product(hf_config: Mapping[str, Any], tokens: int) -> float:
    """r averaged over the linear layers of a transformer layer by size; a token's experts count as one wide layer."""
    hidden, head = hf_config["hidden_size"], head_dim(hf_config)
    queries = hf_config["num_attention_heads"] * head
    keys = hf_config["num_key_value_heads"] * head
    ffn = hf_config["intermediate_size"]
    if num_experts(hf_config):
        ffn = hf_config["moe_intermediate_size"] * hf_config["num_experts_per_tok"]
    shapes = [(queries + 2 * keys, hidden), (hidden, queries), (2 * ffn, hidden), (hidden, ffn)]
    parts = [(p * d, min(1.0, tokens * (p + d) / (2 * p * d))) for p, d in shapes]
    return sum(weight * ratio for weight, ratio in parts) / sum(weight for weight, _ in parts)


def _reason(best: str, costs: Mapping[str, float], problems: Mapping[str, Problem | None], tokens: int) -> str:
    others = ", ".join(
        f"{mode} {costs[mode]:.2f}x" if problem is None else f"{mode}: {problem[0]}"
        for mode, problem in problems.items()
        if mode != best
    )
    return f"expected {costs[best]:.2f}x a plain step at {tokens} tokens a sample ({others})"


def with_mode(config: Config, mode: str) -> Config:
    """The run with this norm mode."""
    return config.model_copy(update={"gradnorm": config.gradnorm.model_copy(update={"mode": mode})})
