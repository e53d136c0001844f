"""A stopped and resumed run equals the unbroken run: bit for bit in the same layout, to 1e-6 in another.

Saved samples replace vLLM, so that only the trainer can differ. Not covered: resuming with engines, after signals and
after SIGKILL (tests/e2e/test_resume.py, tools/kill_resume.py).
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oblr_megatron import opening, step_loop
from oblr_megatron.checkpoint import hf, store
from oblr_megatron.checkpoint.convert import to_megatron
from oblr_megatron.checkpoint.store import checkpoints_of
from oblr_megatron.config import Config
from oblr_megatron.errors import EngineLostError, UserError
from oblr_megatron.model.parallel import shutdown
from oblr_megatron.observe.status import read_status
from oblr_megatron.preflight.inputs import Inputs, preflight
from oblr_megatron.rollout.replay import ReplayEngine
from oblr_megatron.runtime.run_lock import run_lock
from tests.distributed.launch import run_ranks
from tests.distributed.replayed import SHORT, certain, config_of, exported, make_inputs, stored, train, train_here
from tests.tiny import make_hf_dir

TP2 = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
PP2 = ("parallel.pipeline_model_parallel_size=2",)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on one rank, with checkpoints after 4 and 8."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    train(config_of(inputs, run_dir))
    return run_dir


def beginning_of(run_dir: Path, copy: Path) -> Path:
    """The run as it was at its last but one checkpoint; the metrics still hold the later steps."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns(checkpoints_of(run_dir)[0].name))
    shutil.rmtree(copy / "hf")
    return copy


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora.rank=2", "algo.kl_coefficient=0.1", "gradnorm.mode=two_pass", "model.dtype=bfloat16"),
        ("optimizer.name=sgd", "optimizer.sgd_momentum=0.9", "algo.schedule=cosine", "checkpoint.async_save=false"),
        ("algo.kl_coefficient=0.1", "gradnorm.mode=two_pass"),
        ("algo.baseline=pooled", "gradnorm.mode=auto", "gradnorm.sample_fraction=0.5"),
        ("algo.baseline=optimal_pooled",),
        ("algo.preset=oblr_tempered", "gradnorm.mode=auto"),
        ("algo.baseline=pooled", "gradnorm.mode=inline", "algo.keep=0.5"),
        ("algo.preset=dapo", "algo.updates_per_batch=2", "algo.schedule=cosine", "gradnorm.mode=two_pass"),
    ],
    ids=["lora", "sgd, synchronous", "kl", "subsample", "pull", "tempered", "thinned", "updates"],
)
def test_two_and_two_steps_are_four(inputs: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Weights, masters, moments, schedule and metrics, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(inputs, whole, *SHORT, *overrides))
    resume = ("checkpoint.resume=newest", *SHORT, *overrides)
    train(config_of(inputs, beginning_of(whole, parts), *resume))
    assert certain(parts) == certain(whole) and len(certain(whole)) == 4
    assert_equal(exported(parts), exported(whole))
    newest = [checkpoints_of(run_dir)[0] for run_dir in (parts, whole)]
    assert [path.name for path in newest] == ["step_00000004"] * 2
    found, expected, before = stored(*newest, checkpoints_of(whole)[1])
    assert_equal(found, expected)
    assert any("optimizer.state" in name for name in found), "moments were compared"
    uses_base = any(override.startswith(("model.lora", "algo.kl")) for override in overrides)
    assert (store.read_manifest(newest[0]).state["base"] is not None) == uses_base
    assert any(not torch.equal(before[name], found[name]) for name in found if "optimizer" in name)


def test_the_warm_up_goes_on_with_another_number_of_updates(inputs: Path, tmp_path: Path) -> None:
    """It counts updates: four in two steps, and then one a step."""
    keys = ("algo.preset=dapo", "optimizer.lr=1e-3", "optimizer.lr_warmup_steps=8", "gradnorm.mode=two_pass", *SHORT)
    train(config_of(inputs, tmp_path, *keys, "num_steps=2", "algo.updates_per_batch=2"))
    train(config_of(inputs, tmp_path, *keys, "algo.updates_per_batch=1", "checkpoint.resume=newest"))
    assert [record["lr"] for record in certain(tmp_path)] == pytest.approx([2.5e-4, 5e-4, 6.25e-4, 7.5e-4])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_saved_before_the_first_gradient(tmp_path: Path, optimizer: str) -> None:
    """Two steps without a reward: the optimizer has not stepped when the checkpoint is written."""
    inputs = make_inputs(tmp_path, worthless=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    overrides = (f"optimizer.name={optimizer}", "optimizer.sgd_momentum=0.9", *SHORT)
    train(config_of(inputs, whole, *overrides))
    assert [record["grad_norm"] > 0 for record in certain(whole)] == [False] * 2 + [True] * 2
    train(config_of(inputs, beginning_of(whole, parts), "checkpoint.resume=newest", *overrides))
    assert certain(parts) == certain(whole)
    assert_equal(exported(parts), exported(whole))
    assert_equal(*stored(checkpoints_of(parts)[0], checkpoints_of(whole)[0]))


@pytest.mark.parametrize(("ranks", "layout"), [(4, (*TP2, *PP2)), (2, ())], ids=["tp2xpp2", "dp2"])
def test_another_layout_goes_on_within_rounding(
    inputs: Path, unbroken: Path, tmp_path: Path, ranks: int, layout: tuple[str, ...]
) -> None:
    """From one rank to several, for four more steps."""
    parts = beginning_of(unbroken, tmp_path / "parts")
    train(config_of(inputs, parts, "checkpoint.resume=newest", *layout), ranks)
    assert_equal(exported(parts), exported(unbroken), 1e-6)
    assert_equal(*stored(checkpoints_of(parts)[0], checkpoints_of(unbroken)[0]), 1e-6)


def test_from_several_ranks_to_one(inputs: Path, tmp_path: Path) -> None:
    """In fp64: in fp32, steps of Adam on four ranks differ by more than the tolerance."""
    whole, parts, fp64 = tmp_path / "whole", tmp_path / "parts", "model.dtype=float64"
    train(config_of(inputs, whole, fp64, *SHORT))
    train(config_of(inputs, parts, fp64, "num_steps=2", *TP2, *PP2), 4)
    train(config_of(inputs, parts, fp64, "checkpoint.resume=newest", *SHORT))
    assert_equal(*stored(checkpoints_of(parts)[0], checkpoints_of(whole)[0]), 1e-10)


@pytest.mark.nightly
def test_adapters_of_experts_from_several_ranks_to_one(tmp_path: Path) -> None:
    """Their pairs and moments are placed by the number of the expert over all ranks."""
    inputs = make_inputs(tmp_path, mixture=True, dtype=torch.float64)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("model.dtype=float64", "model.lora.rank=2", "gradnorm.mode=two_pass")
    ep2 = ("parallel.expert_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1")
    train(config_of(inputs, whole, *options))
    train(config_of(inputs, parts, *options, "num_steps=4", *TP2, *ep2), 4)
    train(config_of(inputs, parts, *options, "checkpoint.resume=newest"))
    found, expected = stored(checkpoints_of(parts)[0], checkpoints_of(whole)[0])
    assert_equal(found, expected, 1e-10)
    assert any("lora.experts.gate_proj.B" in name for name in found)
    assert_equal(exported(parts), exported(whole), 1e-10)


def test_tied_embeddings_over_two_stages(tmp_path: Path) -> None:
    """The last stage's copy of the embedding is saved once."""
    inputs = make_inputs(tmp_path, tied=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config_of(inputs, whole, *SHORT, *PP2), 2)
    train(config_of(inputs, beginning_of(whole, parts), "checkpoint.resume=newest", *SHORT, *PP2), 2)
    assert_equal(exported(parts), exported(whole))
    assert not any("output_layer" in name for name in stored(checkpoints_of(whole)[0])[0])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "file"), [(flip, "__0_0.distcp"), (zero, "hf/config.json")], ids=["flipped", "zeroed"]
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    inputs: Path, unbroken: Path, tmp_path: Path, damage: Any, file: str
) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(unbroken, parts, ignore=shutil.ignore_patterns("status.json"))  # which says that it is finished
    newest, older = checkpoints_of(parts)
    damage(newest / file)
    resume = config_of(inputs, parts, "checkpoint.resume=newest")
    said = train(resume)
    assert f"{newest / file}]" in said and f"continues after step 4, from {older}" in said
    assert certain(parts) == certain(unbroken)
    assert_equal(exported(parts), exported(unbroken))

    (parts / "status.json").unlink()
    for path in checkpoints_of(parts):
        damage(path / file)
    metrics = (parts / "metrics.jsonl").read_bytes()
    error = train(resume, status=2).splitlines()[-1]
    assert error.startswith("error: ") and file in error
    assert (parts / "metrics.jsonl").read_bytes() == metrics, "nothing is lost by trying"


@pytest.mark.parametrize("layout", [(), TP2], ids=["1", "tp2"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_skipped(
    inputs: Path, unbroken: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """An older one would lose steps, and the newest would be taken again by the next resume."""
    parts = tmp_path / "parts"
    shutil.copytree(unbroken, parts, ignore=shutil.ignore_patterns("status.json"))
    before = state_of(parts)
    config = config_of(inputs, parts, "checkpoint.resume=newest", *layout)
    outcomes = run_ranks(_stale, 2 if layout else 1, config)
    assert {status for status, _ in outcomes} == {2}
    assert f"{os.strerror(errno.ESTALE)} [{checkpoints_of(parts)[0]}" in outcomes[0][1]
    assert state_of(parts) == before


def test_an_older_checkpoint_that_cannot_be_read_now_does_not_stop_a_resume(
    inputs: Path, unbroken: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(unbroken, parts, ignore=shutil.ignore_patterns("status.json"))
    ((status, said),) = run_ranks(_older_stale, 1, config_of(inputs, parts, "checkpoint.resume=newest"))
    assert status == 0 and f"skipped an unreadable checkpoint: stale [{checkpoints_of(parts)[1]}]" in said
    assert_equal(exported(parts), exported(unbroken))


def _older_stale(config: Config) -> tuple[int, str]:
    read, older = store.read_manifest, checkpoints_of(config.run_dir)[1]

    def stale(path: Path) -> Any:
        if path.name == older.name:
            raise store.UnreadError("stale", where=str(path))
        return read(path)

    store.read_manifest = stale
    return train_here(config)


def _stale(config: Config) -> tuple[int, str]:
    """The rank that reads the newest checkpoint's tensors finds a stale handle."""
    entry, newest = store._entry, checkpoints_of(config.run_dir)[0]

    def stale(file: Path) -> Any:
        if file.suffix == ".distcp" and file.parent.name == newest.name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))
        return entry(file)

    store._entry = stale
    return train_here(config)


@pytest.fixture(scope="module")
def places(inputs: Path, unbroken: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the tests of refused checkpoints name."""
    root = tmp_path_factory.mktemp("places")
    foreign = root / "foreign"
    shutil.copytree(checkpoints_of(unbroken)[0], foreign, ignore=shutil.ignore_patterns("checkpoint.json"))
    other = make_hf_dir(root / "model", num_hidden_layers=4)
    weights = run_ranks(converted, 1, inputs / "model", root / "weights")[0]
    sgd = with_config(unbroken, root / "sgd", "optimizer", {"name": "sgd", "sgd_momentum": 0.0})
    adapted = with_config(unbroken, root / "adapted", "model", {}, base="0" * 16)
    return {"foreign": foreign, "run": unbroken, "other": other, "weights": weights, "sgd": sgd, "adapted": adapted}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("checkpoint.resume={foreign}",), "distributed checkpoint of another program"),
        (("checkpoint.resume={run}/checkpoints/step_00000004", "seed=1"), "made with seed 0, but the config has 1"),
        (
            ("checkpoint.resume={run}/checkpoints/step_00000004", "data.shuffle=false"),
            "with data.shuffle true, but the config has false",
        ),
        (("checkpoint.resume={run}/checkpoints/step_00000004", "algo.token_scale=3"), "but the config divides by 3"),
        (("checkpoint.resume={run}/checkpoints/step_00000004", "model.path={other}"), "model differs from"),
        (("run_dir={run}",), "run_dir holds a run"),
        (("checkpoint.resume={weights}",), "holds only weights"),
        (("checkpoint.resume={sgd}", "optimizer.name=sgd", "optimizer.sgd_momentum=0.9"), "made without momentum"),
        (
            ("checkpoint.resume={adapted}", "algo.kl_coefficient=0.1", "gradnorm.mode=two_pass"),
            "KL penalty has another reference",
        ),
    ],
)
def test_a_checkpoint_that_does_not_belong_is_refused(
    inputs: Path, places: dict[str, Path], tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    """With one line and status 2; the run directory is not touched. tests/unit/test_opening.py has every setting."""
    filled = [override.format(**places) for override in overrides]
    said = train(config_of(inputs, tmp_path / "new", *filled), status=2)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "new").exists()


def with_config(run_dir: Path, copy: Path, section: str, values: dict[str, Any], **facts: Any) -> Path:
    """A copy of the run's checkpoint of step 4 with other facts, and other values in a section of its configuration."""
    shutil.copytree(run_dir / "checkpoints" / "step_00000004", copy)
    found = store.read_manifest(copy)
    found.state.update(facts)
    found.state["config"][section] |= values
    (copy / store.MANIFEST).write_bytes(store._render(found))
    return copy


def converted(model: Path, target: Path) -> Path:
    """What `convert to-megatron` writes."""
    shutdown()  # a conversion has a process group of its own
    to_megatron(model, target)
    return target


def test_a_checkpoint_of_another_run_is_taken_by_its_path(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """Into a new run directory, at another rate; the same command resumes the new run once it has checkpoints."""
    at_four = unbroken / "checkpoints" / "step_00000004"
    run_dir = tmp_path / "run"
    overrides = (f"checkpoint.resume={at_four}", "optimizer.lr=2e-2", "checkpoint.every_steps=2")
    train(config_of(inputs, run_dir, "num_steps=6", *overrides))
    assert [record["step"] for record in certain(run_dir)] == [5, 6]
    train(config_of(inputs, run_dir, *overrides))
    assert [record["step"] for record in certain(run_dir)] == [5, 6, 7, 8]
    assert certain(run_dir)[0]["lr"] == 2 * certain(unbroken)[4]["lr"]


def state_of(run_dir: Path) -> dict[Path, bytes]:
    """Every file of a run."""
    return {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}


def refused(config: Config, ranks: int = 1) -> str:
    """The one error line of a run that is refused and leaves its directory as it was."""
    before = state_of(config.run_dir)
    (error,) = (line for line in train(config, ranks, status=2).splitlines() if "error: " in line)
    assert state_of(config.run_dir) == before
    return error


def test_steps_without_a_checkpoint_are_not_lost(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """A job script gives --resume every time, also the first time. A finished run is not opened again."""
    run_dir, resume = tmp_path / "run", "checkpoint.resume=newest"
    short = ("num_steps=2", "checkpoint.every_steps=0")
    train(config_of(inputs, run_dir, resume, *short))
    assert not checkpoints_of(run_dir)
    before = state_of(run_dir)
    said = train(config_of(inputs, run_dir, resume, *short, "optimizer.lr=5e-3"))
    assert "finished: step 2 of 2" in said
    changed = {path.name for path, content in state_of(run_dir).items() if before[path] != content}
    assert changed == {"status.json"}, "its time"
    error = refused(config_of(inputs, run_dir, resume))
    assert "come to step 2" in error and f"model.path={run_dir / 'hf'}" in error
    at_four = f"checkpoint.resume={unbroken / 'checkpoints' / 'step_00000004'}"
    assert "come to step 2" in refused(config_of(inputs, run_dir, at_four))
    shutil.rmtree(run_dir / "hf")
    assert str(run_dir / "metrics.jsonl") in refused(config_of(inputs, run_dir, resume))
    (run_dir / "metrics.jsonl").unlink()
    train(config_of(inputs, run_dir, resume))
    assert certain(run_dir) == certain(unbroken)


def test_a_resume_that_is_refused_changes_nothing(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """The newest checkpoint is of a run that sampled; the metrics are damaged; another run holds the lock."""
    parts, resume = beginning_of(unbroken, tmp_path / "parts"), "checkpoint.resume=newest"
    with run_lock(parts):
        assert f"process {os.getpid()} on" in refused(config_of(inputs, parts, resume))
    manifest = parts / "checkpoints" / "step_00000004" / "checkpoint.json"
    good = manifest.read_text()
    found = store.read_manifest(manifest.parent)
    sampled = replace(found, state=found.state | {"data": {"fingerprint": "f", "seed": 0}})
    manifest.write_bytes(store._render(sampled))
    assert "rollout.replay" in refused(config_of(inputs, parts, resume))
    manifest.write_text(good)
    metrics = parts / "metrics.jsonl"
    metrics.write_text("garbage\n" + metrics.read_text())
    for ranks in (1, 2):
        assert f"{metrics}:1" in refused(config_of(inputs, parts, resume), ranks)


@pytest.mark.parametrize("name", ["hf", "hf_best"])
def test_a_run_goes_on_from_its_own_export(inputs: Path, unbroken: Path, tmp_path: Path, name: str) -> None:
    """The export is read until the new one is complete; a KL penalty would get another reference by it."""
    parts = beginning_of(unbroken, tmp_path / "parts")
    shutil.copytree(inputs / "model", parts / name)
    (parts / "status.json").unlink()  # it says that the run is finished
    resume = ("checkpoint.resume=newest", f"model.path={parts / name}")
    error = refused(config_of(inputs, parts, *resume, "algo.kl_coefficient=0.1", "gradnorm.mode=two_pass"))
    assert "kl_coefficient" in error and str(parts / name) in error
    train(config_of(inputs, parts, *resume))
    assert_equal(exported(parts), exported(unbroken))
    assert not list(parts.glob(".*.partial"))


@pytest.mark.parametrize("layout", [(), TP2], ids=["1", "tp2"])
def test_an_export_that_fails_keeps_the_older_one(
    inputs: Path, unbroken: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Rank 0 fails before its second tensor, of which the other rank sends a part."""
    parts = tmp_path / "parts"
    shutil.copytree(unbroken, parts)
    (parts / "status.json").unlink()  # else the run is finished
    before = state_of(parts / "hf")
    config = config_of(inputs, parts, "checkpoint.resume=newest", *layout)
    outcomes = run_ranks(_full_at_the_export, 2 if layout else 1, config)
    assert {status for status, _ in outcomes} == {1} and "hf was not written: " in outcomes[0][1]
    assert "No space left" in outcomes[0][1]
    assert state_of(parts / "hf") == before and not list(parts.glob(".*.partial"))


def test_weights_that_no_checkpoint_has_are_saved_if_the_export_fails(
    inputs: Path, unbroken: Path, tmp_path: Path
) -> None:
    run_dir, never = tmp_path / "run", "checkpoint.every_steps=0"
    ((status, said),) = run_ranks(_full_at_the_export, 1, config_of(inputs, run_dir, never))
    assert status == 1 and "hf was not written: " in said and not (run_dir / "hf").exists()
    assert [path.name for path in checkpoints_of(run_dir)] == [checkpoints_of(unbroken)[0].name]
    said = train(config_of(inputs, run_dir, "checkpoint.resume=newest", never))
    assert "finished 8 of 8 steps" in said, "no step was left"
    assert_equal(exported(run_dir), exported(unbroken))


def test_an_adapter_is_written_where_the_merged_weights_do_not_fit(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ((status, said),) = run_ranks(_full_at_the_export, 1, config_of(inputs, run_dir, "model.lora.rank=2"))
    assert status == 1 and "hf was not written: " in said and "adapter was not written" not in said
    assert (run_dir / "adapter" / "adapter_model.safetensors").exists() and not (run_dir / "hf").exists()


def _full_at_the_export(config: Config) -> tuple[int, str]:
    def full(stream: Any, *_: Any) -> int:
        next(stream)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    hf.write_weights = full  # type: ignore[assignment]
    return train_here(config)


def test_a_run_outlives_its_model_directory(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """A purged scratch disk: the directory disappears before the first step."""
    own = shutil.copytree(inputs, tmp_path / "inputs")
    run_dir, seen = tmp_path / "run", {path.name for path in (own / "model").iterdir()}
    ((status, said),) = run_ranks(_purged, 1, config_of(own, run_dir), own / "model")
    assert status == 0, said
    assert_equal(exported(run_dir), exported(unbroken))
    assert {path.name for path in (run_dir / "hf").iterdir()} == seen
    for path in checkpoints_of(run_dir):
        manifest = store.read_manifest(path)
        store.check_contents(path, manifest, manifest.files)
        assert {file.name for file in (path / "hf").iterdir()} == seen - {"model.safetensors"}
    assert len(checkpoints_of(run_dir)) == 2


def _purged(config: Config, model: Path) -> tuple[int, str]:
    return interrupted(config, lambda: shutil.rmtree(model))


def interrupted(config: Config, act: Callable[[], object]) -> tuple[int, str]:
    """A run during which something happens before its first step."""
    train = step_loop.train

    def after_act(run: Any) -> None:
        act()
        train(run)

    step_loop.train = after_act
    return train_here(config)


def test_an_export_follows_a_link(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """The user moved it to a larger disk; a file in its place is refused before any step."""
    parts, elsewhere = beginning_of(unbroken, tmp_path / "parts"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old").touch()
    (parts / "hf").touch()
    (parts / "status.json").unlink()
    config = config_of(inputs, parts, "checkpoint.resume=newest")
    assert f"[{parts / 'hf'}]" in refused(config)
    (parts / "hf").unlink()
    (parts / "hf").symlink_to(elsewhere)
    train(config)
    assert (parts / "hf").is_symlink() and not (elsewhere / "old").exists()
    assert_equal(exported(parts), exported(unbroken))


def test_an_export_that_appears_while_the_run_trains_stays(inputs: Path, tmp_path: Path) -> None:
    """The run fails after its last step, with its own reason; the failure is added to others, such as a full disk."""
    run_dir = tmp_path / "run"
    outcomes = run_ranks(_converted_meanwhile, 2, config_of(inputs, run_dir, "num_steps=1"))
    assert {status for status, _ in outcomes} == {1}
    assert f"hf was not written: the target exists [{run_dir / 'hf'}]" in outcomes[0][1]
    assert [path.name for path in (run_dir / "hf").iterdir()] == ["mine"] and len(checkpoints_of(run_dir)) == 1


def _converted_meanwhile(config: Config) -> tuple[int, str]:
    return interrupted(config, lambda: (config.run_dir / "hf" / "mine").mkdir(parents=True, exist_ok=True))


def test_a_checkpoint_is_found_without_the_config_of_its_run(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    parts = beginning_of(unbroken, tmp_path / "parts")
    (parts / "config.json").unlink()
    assert "--resume" in train(config_of(inputs, parts), status=2)
    train(config_of(inputs, parts, "checkpoint.resume=newest"))
    assert certain(parts) == certain(unbroken)


def test_a_mistake_that_one_rank_finds_is_refused_by_all(inputs: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(bad_on_rank_1, 2, config_of(inputs, tmp_path / "run"))
    assert [status for status, _ in outcomes] == [2, 2]
    assert outcomes[0][1] == "error: found by rank 1 [there]. Fix: repair it\n" and outcomes[1][1] == ""
    assert not (tmp_path / "run").exists()


def bad_on_rank_1(config: Config) -> tuple[int, str]:
    """A run with a check that fails on rank 1 alone."""

    def check(*arguments: Any, owns_run_dir: bool = True) -> Inputs:
        if not owns_run_dir:
            raise UserError("found by rank 1", where="there", fix="repair it")
        return preflight(*arguments)

    opening.preflight = check  # type: ignore[assignment]  # in the process of this rank
    return train_here(config)


def test_a_run_stops_in_time(inputs: Path, unbroken: Path, tmp_path: Path) -> None:
    """The margin leaves no time for a second step: the run saves after the first and can be resumed."""
    run_dir = tmp_path / "run"
    limits = ("checkpoint.time_limit_s=1000", "checkpoint.exit_before_timeout_s=999.99")
    said = train(config_of(inputs, run_dir, *limits), 2)
    assert "stopped after step 1 of 8 (the time limit); continue with --resume" in said
    assert [path.name for path in checkpoints_of(run_dir)] == ["step_00000001"] and not (run_dir / "hf").exists()
    train(config_of(inputs, run_dir, "checkpoint.resume=newest"))
    assert [record["step"] for record in certain(run_dir)] == list(range(1, 9))
    assert_equal(exported(run_dir), exported(unbroken), 1e-6)


def test_a_signal_before_the_first_step_ends_the_run_before_it(inputs: Path, tmp_path: Path) -> None:
    """Engines take minutes to start, and the evaluation may take longer than the job has left."""
    config = config_of(inputs, tmp_path / "run")
    outcomes = run_ranks(signalled_on_rank_1, 2, config)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert "stopped after step 0 of 8 (SIGUSR1); continue with --resume" in outcomes[0][1]
    status = read_status(config.run_dir)
    assert (status.state, status.step, status.reason) == ("stopped", 0, "SIGUSR1")
    assert not (config.run_dir / "metrics.jsonl").exists() and not checkpoints_of(config.run_dir)


def signalled_on_rank_1(config: Config) -> tuple[int, str]:
    """A run of which one rank gets a signal while the first weights are pushed."""
    push = ReplayEngine.push

    def pushed(*arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGUSR1)
        return push(*arguments)

    ReplayEngine.push = pushed  # type: ignore[method-assign]  # in the process of this rank
    return train_here(config)


@pytest.mark.parametrize(("lost_in", "saved"), [("generate", 5), ("push", 6)])
def test_engines_lost_for_good_leave_a_checkpoint(
    inputs: Path, unbroken: Path, tmp_path: Path, lost_in: str, saved: int
) -> None:
    """Lost in the rollout of step 6: the checkpoint is of step 5. Lost in the push of its weights: of step 6."""
    run_dir = tmp_path / "run"
    status, said = run_ranks(losing, 1, config_of(inputs, run_dir, "checkpoint.every_steps=0"), lost_in)[0]
    assert status == 1 and said.splitlines()[-1].endswith("the engine is gone"), said
    assert [path.name for path in checkpoints_of(run_dir)] == [f"step_0000000{saved}"]
    assert certain(run_dir) == certain(unbroken)[:saved]
    train(config_of(inputs, run_dir, "checkpoint.resume=newest"))
    assert certain(run_dir) == certain(unbroken)
    assert_equal(exported(run_dir), exported(unbroken))


def losing(config: Config, lost_in: str) -> tuple[int, str]:
    """A run with an engine that fails in the sixth step."""
    whole = getattr(ReplayEngine, lost_in)
    calls = itertools.count(0 if lost_in == "push" else 1)

    def failing(engine: ReplayEngine, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 6:
            error = EngineLostError("the engine is gone")
            error.raised_on_all_ranks = True  # as `collectives.raise_first` raises it on every rank
            raise error
        return whole(engine, *arguments, **options)

    setattr(ReplayEngine, lost_in, failing)
    return train_here(config)
