"""The one list of what is checked before a run, in order. Each command leaves out what it cannot know yet.

    check(run, "layout", "here", "owner")            `train` at once, without torch
    check(run, "layout", "here", "device", "owner")  rank 0; the other ranks without "owner"
    check(run, "layout", "device")                   a dry run for other machines
    check(run, "device")                             the planner, which tries layouts itself

Before it, the first rank checks the run directory and takes its lock (`checks.run_dir`, `runtime.run_lock`).

Each problem is a `UserError`: one line, exit status 2. Imports no torch at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oblr_megatron.checkpoint.partials import disk_bytes
from oblr_megatron.checkpoint.store import (
    NoSpaceError,
    check_replaceable,
    check_space,
    checkpoint_bytes,
    checkpoints_of,
)
from oblr_megatron.checks.layout import check_layout, heads_problem
from oblr_megatron.checks.lengths import check_positions
from oblr_megatron.checks.machine import (
    ANY_GPU,
    build_problem,
    check_head_size,
    check_machine,
    check_pushable,
    compiler_problem,
    refuse,
)
from oblr_megatron.checks.run_dir import ADAPTERS, CHECKPOINTS, EXPORTS, check_saved_samples
from oblr_megatron.checks.vllm_options import check_processor, check_routes, check_speculation, check_vllm_options
from oblr_megatron.data.sources import convention_of, kind_of
from oblr_megatron.environments.registry import check_environment
from oblr_megatron.errors import UserError
from oblr_megatron.extension import extension
from oblr_megatron.memory.engine import check_cache, engine_bytes
from oblr_megatron.observe.trackers.registry import check_trackers
from oblr_megatron.rewards.registry import check_reward, check_rows, check_services
from oblr_megatron.runtime.stopping import check_time_left

if TYPE_CHECKING:
    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.config.data import SourceConfig

Need = Literal["layout", "here", "device", "engines", "owner"]
"""Inputs of a check besides the settings of the run: its layout, this machine's files and packages, its device, which
only torch knows, the packages of engines that start here, and what only one rank uses.
"""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A run that may start.

    Example: Proposed(config, {"vocab_size": 512, ...}, world_size=16, per_node=8, on_gpu=True)
    """

    config: Config
    hf_config: Mapping[str, Any]
    world_size: int
    per_node: int  # ranks of a node
    on_gpu: bool = False  # for checks that need "device"
    model: HFDir | None = None  # None: on another machine

    @property
    def scored(self) -> tuple[SourceConfig, ...]:
        """The sources that the reward scores; none in a replay."""
        if self.config.rollout.replay is not None:
            return ()
        return (*self.config.data.train, *self.config.evaluate.data.values())

    @property
    def here(self) -> HFDir:
        """The model directory, for checks that need "here"."""
        assert self.model is not None, "the model is on another machine"
        return self.model


def check(run: Proposed, *known: Need) -> None:
    """Check a run in the order of the list.

    Args:
        run: the run.
        known: what checks may read; the others are left out.

    Raises:
        UserError: the first problem.
    """
    for needs, one in CHECKS:
        if set(needs.split()) <= set(known):
            one(run)


def check_room(config: Config, model: HFDir) -> None:
    """Refuse a run without space for its exports and the checkpoints that it will hold, whichever it writes.

    The next checkpoint is written before an old one is removed: the keep_last newest and the best stay. Exports may be
    links to another disk. Partial directories of killed saves and exports will be removed.
    """
    saves = config.checkpoint
    if config.rollout.only:
        return
    folder, checkpoint, exports = config.run_dir / CHECKPOINTS, 0, list[Path]()
    saved = "checkpoint.every_steps, best_metric and exit_before_timeout_s (every_steps = 0)"
    exported = "checkpoint.export_hf (false)"
    if saves.every_steps or saves.best_metric or saves.exit_before_timeout_s:
        checkpoint = checkpoint_bytes(model, config)
    if saves.export_hf:
        exports = [(config.run_dir / name).resolve() for name in (EXPORTS if saves.best_metric else EXPORTS[:1])]
    stay, held = saves.keep_last + bool(saves.best_metric), len(checkpoints_of(config.run_dir))
    new = max(1, min(stay + 1, _most_saves(config)) - held)  # until the first removal
    last = (new - (held + new > stay)) * checkpoint  # what the exports find
    disk = {path: _device(path) for path in (folder, *exports)}
    for device in dict.fromkeys(disk.values()):
        here = [export for export in exports if disk[export] == device]
        needed = model.num_bytes * len(here)
        freed = sum(disk_bytes(export.parent, only=export.name) for export in here)
        keys = " or ".join([*[saved] * bool(checkpoint), *[exported] * bool(here)])
        place, where, fix = folder, "run_dir", f"choose a run_dir with more space, or leave out {keys}"
        fix = f"{fix}, or lower checkpoint.keep_last" if checkpoint and new > 1 and saves.keep_last > 1 else fix
        if device == disk[folder]:
            needed = max(new * checkpoint, last + needed)
            freed += disk_bytes(folder)
        else:
            place, where = here[0].parent, str(here[0])
            fix = "link it to a disk with more space, or set checkpoint.export_hf to false"
        if not needed:
            continue
        try:
            check_space(place, needed, freed=freed)
        except NoSpaceError as error:
            raise UserError(str(error), where=where, fix=fix) from error


def _most_saves(config: Config) -> int:
    """Most checkpoints that a run writes: those that are due, the best ones, and at least one when it stops."""
    saves = config.checkpoint
    steps = (saves.every_steps, config.evaluate.every_steps if saves.best_metric else 0)
    return max(1, sum(-(-config.num_steps // each) for each in steps if each))


def _device(path: Path) -> int:
    """The file system of a path that need not exist yet."""
    return next(one for one in (path, *path.absolute().parents) if one.exists()).stat().st_dev


def _any_machine(run: Proposed) -> None:
    if run.on_gpu:  # also in a dry run for another machine
        check_machine(run.config, run.hf_config, ANY_GPU)


def _saved_samples(run: Proposed) -> None:
    if run.config.rollout.replay is not None:  # `_replay` asks again, but it imports torch
        check_saved_samples(run.config.rollout.replay)


def _conventions(run: Proposed) -> None:
    for source in run.scored:
        convention_of(source)


def _sources(run: Proposed) -> None:
    for source in (*run.scored, *(run.config.data.exclude if run.scored else ())):
        kind_of(source)


def _machine(run: Proposed) -> None:
    from oblr_megatron.model.precision import this_machine

    run.here.hf_config()  # raises if transformers cannot read it
    check_machine(run.config, run.hf_config, this_machine())
    if run.on_gpu:
        refuse(compiler_problem())


def _baseline(run: Proposed) -> None:
    from oblr_megatron.algo.user_baseline import check_baseline

    if not run.config.rollout.only:
        check_baseline(run.config.algo.baseline, run.config.num_prompts, run.config.group_size)


def _vllm_options(run: Proposed) -> None:
    rollout = run.config.rollout
    if rollout.replay is None:
        check_vllm_options(rollout.vllm, on_gpu=run.on_gpu)
        if run.config.model.moe_routing_replay:
            check_routes(run.hf_config, rollout.vllm, rollout.speculation, on_gpu=run.on_gpu, where="config: rollout")


def _engines(run: Proposed) -> None:
    from oblr_megatron.rollout.placement import place

    if not run.config.rollout.own_engines:
        return
    check_head_size(run.hf_config, run.config.model.path, on_gpu=run.on_gpu)
    place(run.config, run.world_size, run.per_node, on_gpu=run.on_gpu)
    size = run.config.rollout.tensor_parallel_size  # vLLM divides the heads among an engine's devices
    if problem := heads_problem(run.hf_config, size, "rollout.tensor_parallel_size"):
        raise UserError(problem[0], where="config: rollout", fix=problem[1])


def _cache(run: Proposed) -> None:
    if run.config.rollout.own_engines and not run.on_gpu:  # the dry run knows the size of a GPU
        check_cache(engine_bytes(run.hf_config, run.config, device_bytes=None), run.config)


def _exact_sums(run: Proposed) -> None:
    if run.config.model.batch_invariant:
        extension("model.batch_invariant")(run.hf_config, run.config, on_gpu=run.on_gpu)


def _profile(run: Proposed) -> None:
    from oblr_megatron.observe.performance.profiler import check_profile

    check_profile(run.config.log, on_gpu=run.on_gpu)


def _engine_packages(run: Proposed) -> None:
    if run.config.rollout.own_engines:
        refuse(build_problem(on_gpu=run.on_gpu))
        check_speculation(run.config.rollout.speculation, "config: rollout.speculation")
        check_processor(run.config.rollout.vllm, on_gpu=run.on_gpu)


def _servers(run: Proposed) -> None:
    from oblr_megatron.rollout.server_checks import check_servers

    if run.config.rollout.replay is None and run.config.rollout.servers:
        check_servers(run.config)


def _replay(run: Proposed) -> None:
    from oblr_megatron.rollout.replay import check_replay

    check_replay(run.config, int(run.hf_config["vocab_size"]), run.here.fingerprint)


def _reward(run: Proposed) -> None:
    check_reward(run.config.reward, max_response_tokens=run.config.rollout.max_response_tokens, reach=False)


def _exports(run: Proposed) -> None:
    saves = run.config.checkpoint
    if saves.export_hf and not run.config.rollout.only:
        for name in EXPORTS if saves.best_metric else EXPORTS[:1]:
            for own in (name, ADAPTERS[name]) if run.config.model.lora.rank else (name,):
                check_replaceable(run.config.run_dir / own)  # it may be a file


def _copied(run: Proposed) -> None:
    _ = run.here.copied  # reads what every save writes: the directory may disappear while the run trains


CHECKS: tuple[tuple[str, Callable[[Proposed], None]], ...] = (
    ("here", lambda run: check_time_left(run.config.checkpoint)),
    ("here", lambda run: check_trackers(run.config.log.trackers)),
    ("layout", lambda run: check_layout(run.hf_config, run.config, run.world_size)),
    ("here device", _machine),
    ("device", _any_machine),
    ("here", _saved_samples),
    ("", _conventions),
    ("device", _baseline),
    ("", lambda run: check_rows(run.config.reward, run.scored)),
    ("", _reward),
    ("here", lambda run: check_services(run.config.reward)),
    ("", lambda run: check_environment(run.config)),
    ("", lambda run: check_positions(run.config, run.hf_config)),
    ("here", _sources),
    ("device", _vllm_options),
    ("device", _engines),
    ("device", lambda run: check_pushable(run.hf_config, run.config, on_gpu=run.on_gpu)),
    ("device", _exact_sums),
    ("device", _profile),
    ("device engines", _cache),
    ("here device engines", _engine_packages),
    ("owner here device", _servers),
    ("owner here device", _replay),
    ("owner here", lambda run: check_room(run.config, run.here)),
    ("owner here", _exports),
    ("owner here", _copied),
)
"""(What a check needs, the check), in order."""
