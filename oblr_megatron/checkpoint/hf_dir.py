"""Is this a whole Qwen3 directory in Hugging Face format? Found out from headers alone, without torch.

A safetensors file is 8 bytes with the length of its JSON header, the header, and as many bytes as the header's last
tensor ends at; so a file that was cut short shows in its size, and nothing needs to be read but the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import Qwen3Config

ARCHITECTURE, MODEL_TYPE = "Qwen3ForCausalLM", "qwen3"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MAX_HEADER_BYTES = 100 * 2**20  # the format's own bound

_DOWNLOAD = "copy or download the model again"


@dataclass(frozen=True, slots=True)
class HFDir:
    """What a model directory holds.

    Example: HFDir(path=Path("Qwen3-0.6B"), config={"model_type": "qwen3", ...}, files=("model.safetensors",),
                   num_bytes=1_192_135_096)
    """

    path: Path
    config: dict[str, Any]  # config.json
    files: tuple[str, ...]  # weight files
    num_bytes: int  # of all weight files

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings", False))

    def hf_config(self) -> Qwen3Config:
        """config.json as transformers reads it."""
        from transformers import Qwen3Config

        return Qwen3Config.from_pretrained(self.path)


def check_hf_dir(path: str | Path) -> HFDir:
    """Check a model directory.

    Raises:
        UserError: the directory, config, tokenizer or weights are missing, of another model, or damaged.
    """
    path = Path(path)
    if not path.is_dir():
        what = "the model path is a file" if path.exists() else "the model directory does not exist"
        raise UserError(what, where=str(path), mend="set model.path to a Hugging Face model directory")
    config = _read_object(path / "config.json")
    _check_architecture(config, path)
    for name in TOKENIZER_FILES:
        if not (path / name).is_file():
            raise UserError(f"{name} is missing", where=str(path), mend="copy the tokenizer's files beside the weights")
    if (path / INDEX).is_file():
        files = _check_shards(path)
    else:
        files = (SINGLE,)
        if not (path / SINGLE).is_file():
            raise UserError(f"neither {SINGLE} nor {INDEX} is there", where=str(path), mend=_DOWNLOAD)
        read_header(path / SINGLE)
    return HFDir(path, config, files, sum((path / file).stat().st_size for file in files))


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors that a safetensors file says it holds: name -> {"dtype", "shape", "data_offsets"}.

    Raises:
        UserError: the file is not of this format, or shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise UserError(f"not a safetensors file, or cut short ({size:,} bytes)", where=str(file), mend=_DOWNLOAD)
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"damaged safetensors header: {error!r}", where=str(file), mend=_DOWNLOAD) from error
    if size != 8 + length + end:
        raise UserError(
            f"truncated or damaged: {size:,} bytes, and {8 + length + end:,} by its header",
            where=str(file),
            mend=_DOWNLOAD,
        )
    return tensors


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file.name}: {error.strerror}", where=str(file.parent), mend=_DOWNLOAD) from error
    except ValueError as error:  # JSON or encoding
        raise UserError(f"not JSON: {error}", where=str(file), mend=_DOWNLOAD) from error
    if not isinstance(value, dict):
        raise UserError(f"holds a {type(value).__name__} instead of an object", where=str(file), mend=_DOWNLOAD)
    return value


def _check_architecture(config: dict[str, Any], path: Path) -> None:
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if model_type != MODEL_TYPE or ARCHITECTURE not in architectures:
        raise UserError(
            f"the model is {model_type!r} ({', '.join(architectures) or 'no architecture'}), not {ARCHITECTURE}",
            where=str(path / "config.json"),
            mend="give a dense Qwen3 model",
        )


def _check_shards(path: Path) -> tuple[str, ...]:
    """Every shard of the index is there, whole, and holds the tensors that the index says."""
    places = _read_object(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError("weight_map is missing or empty", where=str(path / INDEX), mend=_DOWNLOAD)
    files = tuple(sorted(set(places.values())))
    for file in files:
        if not (path / file).is_file():
            raise UserError(f"shard {file} is missing, though {INDEX} names it", where=str(path), mend=_DOWNLOAD)
    held = {file: read_header(path / file).keys() for file in files}
    for name, file in _missing(places, held):
        raise UserError(f"{file} lacks tensor {name!r}, though {INDEX} says otherwise", where=str(path), mend=_DOWNLOAD)
    return files


def _missing(places: dict[str, str], held: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, file) for name, file in places.items() if name not in held[file])
