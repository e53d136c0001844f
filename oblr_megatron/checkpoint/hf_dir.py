"""Checks that a directory is a complete Hugging Face Qwen3 model, from file sizes and headers. Imports no torch.

It finds problems that would otherwise appear minutes later, while many ranks load: missing files, shards truncated by
an interrupted download, an index that contradicts its shards, another architecture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3MoeConfig

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}  # by model_type
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # one of the two sets is needed
LENGTH_BYTES = 8  # at the start of a safetensors file: size of the JSON header, little endian
MAX_HEADER_BYTES = 100_000_000
QUANTIZATION, SCALES = "quantization_config", (".weight_scale", ".input_scale")


@dataclass(frozen=True, slots=True)
class HFDir:
    """A directory that passed `check_hf_dir`.

    Example: HFDir(path=Path("Qwen3-0.6B"), config={"model_type": "qwen3", ...}, weight_files=("model.safetensors",),
                   shapes={"model.norm.weight": (1024,), ...}, tied=True, num_bytes=1503264768)
    """

    path: Path
    config: dict[str, Any]  # contents of config.json
    weight_files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]  # of every tensor in the files
    tied: bool  # input and output embeddings are one tensor
    num_bytes: int  # of all weight files

    def hf_config(self) -> Qwen3Config | Qwen3MoeConfig:
        """The configuration as a transformers object."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The directory's tokenizer.

        Raises:
            UserError: its files are damaged.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except Exception as error:  # damaged files raise many types, some of them from Rust
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"cannot read the tokenizer: {type(error).__name__}: {reason}",
                where=str(self.path),
                fix="download or export the tokenizer files again",
            ) from error


def check_hf_dir(path: str | Path, *, quantized: bool = False) -> HFDir:
    """Check everything that can be checked without reading weights.

    Args:
        path: the directory.
        quantized: also accept directories written by `oblr-megatron quantize`; `shapes` leaves out the scales.

    Raises:
        UserError: names the first problem, the file and the fix.
    """
    path = Path(path)
    if not path.is_dir():
        what = "the model path is a file" if path.exists() else "the model directory does not exist"
        raise UserError(what, where=str(path), fix="give the directory of a Qwen3 checkpoint")
    config = check_hf_files(path)
    listed = _listed_tensors(path)
    shapes, num_bytes = _check_weights(path, listed)
    if QUANTIZATION in config:
        shapes = _without_scales(config, shapes, path, quantized)
    check_tensors(config, shapes, path)
    files = tuple(sorted(listed)) if listed else (SINGLE,)
    tied = bool(config.get("tie_word_embeddings", False))
    return HFDir(path=path, config=config, weight_files=files, shapes=shapes, tied=tied, num_bytes=num_bytes)


def checkpoint_shapes(path: Path, *, quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that an engine loads from a Hugging Face directory, read from headers.

    A stored output layer that the model ties to the embedding is left out, because no engine holds it.

    Args:
        path: the directory.
        quantized: also accept directories written by `oblr-megatron quantize`; scales are left out.

    Raises:
        UserError: the directory is not a complete checkpoint.
    """
    from oblr_megatron.weights.names import HF_OUTPUT

    found = check_hf_dir(path, quantized=quantized)
    return {name: size for name, size in found.shapes.items() if not (found.tied and name == HF_OUTPUT)}


def check_hf_files(path: Path) -> dict[str, Any]:
    """Check config.json and tokenizer of a Qwen3 directory, but not the weights; return the config.

    Raises:
        UserError: names what is missing or wrong, and the file.
    """
    config = _read_json(path / "config.json")
    _check_architecture(config, path)
    _check_tokenizer(path)
    return config


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file.

    Raises:
        UserError: the file is cut off, or is not a safetensors file.
    """
    return {name: tuple(entry["shape"]) for name, entry in read_header(file)[1].items()}


def read_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The offset of the first tensor in a safetensors file, and dtype, shape and relative data_offsets of each.

    Raises:
        UserError: the file is cut off, or is not a safetensors file.
    """
    fix = "download or export the file again"
    try:
        size, stream = file.stat().st_size, file.open("rb")
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=str(file), fix="make it readable") from error
    with stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES + length and length <= MAX_HEADER_BYTES:
            raise UserError(f"the file is cut off inside its header ({size} bytes)", where=str(file), fix=fix)
        try:
            if length > MAX_HEADER_BYTES:
                raise ValueError("header length")
            header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((_end_of(entry) for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError("not a safetensors file", where=str(file), fix=fix) from error
    expected = LENGTH_BYTES + length + end
    if size != expected:
        state = "cut off" if size < expected else "too long"
        raise UserError(f"the file is {state}: {size} bytes, its header describes {expected}", where=str(file), fix=fix)
    return LENGTH_BYTES + length, entries


def _end_of(entry: dict[str, Any]) -> int:
    """End offset of a header entry's tensor; raises KeyError or TypeError if the entry is malformed."""
    tuple(entry["shape"]), str(entry["dtype"])
    return int(entry["data_offsets"][1])


def _read_json(file: Path) -> dict[str, Any]:
    again = "download or export the file again"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file.name} is missing", where=str(file.parent), fix="complete the directory") from error
    except ValueError as error:  # invalid JSON or UTF-8
        raise UserError(f"the file is not JSON: {error}", where=str(file), fix=again) from error
    if not isinstance(content, dict):
        raise UserError("the file is not a JSON object", where=str(file), fix=again)
    return content


def _check_architecture(config: dict[str, Any], path: Path) -> None:
    names = config.get("architectures") or []
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is not None and names in ([architecture], []):
        return
    known = " or ".join(f"model_type {kind!r}, {name}" for kind, name in ARCHITECTURES.items())
    raise UserError(
        f"not a Qwen3 model: model_type {config.get('model_type')!r}, architectures {names!r}",
        where=str(path / "config.json"),
        fix=f"give a Qwen3 checkpoint ({known})",
    )


def _check_tokenizer(path: Path) -> None:
    if any(all((path / name).is_file() for name in names) for names in TOKENIZER_FILES):
        return
    wanted = " or ".join(" with ".join(names) for names in TOKENIZER_FILES)
    raise UserError(f"no tokenizer: {wanted} is missing", where=str(path), fix="copy the tokenizer files here")


def _listed_tensors(path: Path) -> dict[str, set[str]]:
    """The tensors of each shard, from the index; {} for a single file without index."""
    if not (path / INDEX).exists():
        if not (path / SINGLE).is_file():
            raise UserError(
                f"no weights: neither {SINGLE} nor {INDEX} exists",
                where=str(path),
                fix="give a checkpoint in safetensors format (convert .bin files with save_pretrained)",
            )
        return {}
    index = _read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("the index has no weight_map", where=str(path / INDEX), fix="download the index again")
    listed: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        listed.setdefault(str(shard), set()).add(tensor)
    absent = [shard for shard in sorted(listed) if not (path / shard).is_file()]
    if absent:
        raise UserError(
            f"{len(absent)} of {len(listed)} shards are missing, {absent[0]!r} first",
            where=str(path / INDEX),
            fix="download the missing files",
        )
    return listed


def _check_weights(path: Path, listed: dict[str, set[str]]) -> tuple[dict[str, tuple[int, ...]], int]:
    """Read every header; return (shape of every tensor, bytes of all files)."""
    shapes: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    for name in sorted(listed) or [SINGLE]:
        file = path / name
        held = read_shapes(file)
        lacking = sorted(listed.get(name, set()) - held.keys())
        if lacking:
            raise UserError(
                f"the shard lacks {len(lacking)} tensors that the index names, {lacking[0]!r} first",
                where=str(file),
                fix="download index and shards of one version",
            )
        shapes |= held
        num_bytes += file.stat().st_size
    return shapes, num_bytes


def _without_scales(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], path: Path, quantized: bool
) -> dict[str, tuple[int, ...]]:
    """The shapes without the scales of quantised weights."""
    method = dict(config[QUANTIZATION] or {}).get("quant_method")
    if not quantized or method != "modelopt":
        raise UserError(
            f"the weights are quantised ({method})",
            where=str(path / "config.json"),
            fix="give the original, unquantised checkpoint",
        )
    return {name: size for name, size in shapes.items() if not name.endswith(SCALES)}


def check_tensors(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare the tensors in the files with those that config.json implies.

    Raises:
        UserError: a tensor is missing or unknown, or has another shape.
    """
    from oblr_megatron.weights.names import HF_OUTPUT, ModelShape, table

    try:
        expected = {
            name: size for item in table(ModelShape.of(config)) for name, size in zip(item.hf, item.shapes, strict=True)
        }
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the Qwen3 configuration is incomplete: {error}",
            where=str(path / "config.json"),
            fix="use the config.json that came with the weights",
        ) from error
    allowed = {HF_OUTPUT} if config.get("tie_word_embeddings") else set()  # some tied checkpoints store it as well
    unknown = [name for name in shapes if name not in expected and name not in allowed]
    if unknown:
        raise UserError(
            f"{len(unknown)} tensors do not belong to this Qwen3 model, {unknown[0]!r} first",
            where=str(path),
            fix="give a plain Qwen3 checkpoint without added heads or adapters",
        )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise UserError(
            f"{len(missing)} tensors are missing from the weights, {missing[0]!r} first",
            where=str(path),
            fix="give a complete checkpoint with its own config.json",
        )
    for name, size in expected.items():
        if shapes.get(name, size) != tuple(size):
            raise UserError(
                f"{name!r} has shape {list(shapes[name])}, but config.json implies {list(size)}",
                where=str(path),
                fix="use the config.json that came with the weights",
            )
