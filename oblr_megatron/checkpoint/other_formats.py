"""Directories that hold a model in the format of another program, and how to make a checkpoint of it.

    format_in(Path("checkpoint-500"))   # ("a PEFT adapter", "merge it into its base model ...")

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from oblr_megatron.errors import Problem

MERGE = "merge it into its base model (oblr-megatron convert to-hf ADAPTER DST --base MODEL)"
VERL = "merge the shards (python -m verl.model_merger merge)"
FORMATS: tuple[tuple[str, Problem], ...] = (
    ("adapter_config.json", ("a PEFT adapter", MERGE)),
    ("checkpoint.json", ("a checkpoint of a run", "convert it (oblr-megatron convert to-hf CHECKPOINT DST)")),
    (
        ".metadata",
        ("a torch_dist checkpoint", "convert it (oblr-megatron convert to-hf CHECKPOINT DST --hf-source MODEL)"),
    ),
    ("*.gguf", ("weights in GGUF format", "give the original checkpoint in safetensors format")),
    ("model_world_size_*_rank_*.pt", ("verl's shards of the ranks", VERL)),
    ("../model_world_size_*_rank_*.pt", ("verl's config without its weights", VERL)),
    ("zero_to_fp32.py", ("a checkpoint of DeepSpeed", "convert it with zero_to_fp32.py")),
    ("consolidated.*.pth", ("weights in Meta's format", "give the same model in Hugging Face format")),
    ("pytorch_model*.bin", ("weights in .bin files", "convert them (from_pretrained, then save_pretrained)")),
)
"""Pattern of a file; name of the format, and the remedy."""


def format_in(path: Path) -> Problem | None:
    """The other format of a directory without a complete checkpoint, and the remedy; None if none is known."""
    if snapshots := sorted(path.glob("snapshots/*/config.json")):
        return "a cache of the hub", f"give a snapshot in it: {snapshots[-1].parent}"
    return next((problem for pattern, problem in FORMATS if any(path.glob(pattern))), None)


def remedy_for_names(unknown: Sequence[str], expected: Collection[str]) -> str:
    """The remedy for tensors with unknown names: an adapter's, or those of a model inside another module.

    Example: ["_orig_mod.model.norm.weight"] -> "remove '_orig_mod.' from the names of the tensors"
    """
    if any("lora_" in name or ".base_layer." in name for name in unknown):
        return MERGE
    prefixes = (name.removesuffix(own) for name in unknown[:1] for own in expected if name.endswith(f".{own}"))
    if prefix := next(prefixes, ""):
        return f"remove {prefix!r} from the names of the tensors"
    return "give a plain checkpoint without added heads"
