"""Checks that a directory is a complete Hugging Face model, mostly from file sizes and headers. Imports no torch.

It finds problems that would otherwise appear minutes later, while many ranks load: missing files, shards truncated by
an interrupted download, an index that contradicts its shards, another architecture.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblr_megatron.checkpoint.hf_description import OWN_CONFIG, hf_config_in, tokenizer_in
from oblr_megatron.checkpoint.other_formats import format_in, remedy_for_names
from oblr_megatron.checkpoint.safetensors_header import AGAIN, DTYPE_BYTES, read_header
from oblr_megatron.checks.git_lfs import refuse_pointer
from oblr_megatron.checks.layout import ROPES, num_experts
from oblr_megatron.errors import UserError
from oblr_megatron.families import FAMILIES, family_of
from oblr_megatron.formatting import searched_from
from oblr_megatron.model.published import published
from oblr_megatron.weights.names import HF_EMBEDDING, HF_OUTPUT, ModelShape, table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # one of the two sets is needed
COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
"""Files that every save and conversion copies from the source if they exist; also those in TEMPLATES."""
TEMPLATES = "additional_chat_templates"  # transformers' directory of a tokenizer's named templates
UNQUANTIZED = "give the original, unquantised checkpoint"
BUFFERS = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
"""Ends of names that older exports stored, and that transformers and vLLM skip: config.json implies the values."""
QUANTIZATION, SCALES = "quantization_config", (".weight_scale", ".input_scale")
SAMPLED_TENSORS, SAMPLED_BYTES = 64, 4096  # read for a fingerprint
COMPARED_BYTES = 2**24  # read at once
Place = tuple[Path, int, int, int, str]  # of a tensor: file, its mtime in ns, offset, bytes, dtype
FP8_BYTES = {"F8_E4M3": 1}  # allowed in a quantized model only
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Keys of config.json that must be natural numbers."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class HFDir:
    """A directory that passed `check_hf_dir`.

    Example: HFDir(path=Path("Qwen3-0.6B"), config={"model_type": "qwen3", ...}, weight_files=("model.safetensors",),
                   shapes={"model.norm.weight": (1024,), ...}, tied=True, num_bytes=1503264768)
    """

    path: Path
    config: dict[str, Any]  # contents of config.json
    weight_files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]  # of every tensor in the files, without `BUFFERS`
    tied: bool  # input and output embeddings are one tensor
    num_bytes: int  # of all weight files
    dtypes: dict[str, str] = field(default_factory=dict)  # of every tensor in the files, e.g. "BF16"

    def hf_config(self) -> PreTrainedConfig:
        """See `hf_config_in`."""
        return hf_config_in(self.path)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `tokenizer_in`."""
        return tokenizer_in(self.path, int(self.config["vocab_size"]))

    @cached_property
    def copied(self) -> dict[str, bytes]:
        """See `copied_files`; read at the first use and kept, because the directory may disappear while a run trains.

        Qwen3's tokenizer has 11 MB.
        """
        return copied_files(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the weights: of all names, dtypes and shapes, and of 4 KiB from the middle of 64 tensors.

        Copies of a model have the same digest, even if their files are split differently. A training step changes the
        digest if it changes any of these bytes; a step in bf16 with a small rate may change none.
        """
        places = {
            name: (file, start, entry)
            for file in self.weight_files
            for start, entries in [read_header(self.path / file)]
            for name, entry in entries.items()
            if not ((self.tied and name == HF_OUTPUT) or name.endswith(BUFFERS))  # which some copies store, too
        }
        names = sorted(places)
        digest = hashlib.sha256()
        for name in names:
            digest.update(json.dumps([name, places[name][2]["dtype"], places[name][2]["shape"]]).encode())
        for name in names[:: -(-len(names) // SAMPLED_TENSORS)]:
            file, start, entry = places[name]
            begin, end = entry["data_offsets"]
            with (self.path / file).open("rb") as stream:
                stream.seek(start + (begin + end) // 2)
                digest.update(stream.read(min(SAMPLED_BYTES, end - (begin + end) // 2)))
        return digest.hexdigest()[:16]


def _download(path: Path) -> str:
    """The command that downloads the model of this path or name; empty if the path does not tell it."""
    for family in FAMILIES:
        if path.name.removesuffix("-Base") in family.published and str(path.parent) != family.owner:
            return f"hf download {family.owner}/{path.name} --local-dir {path}"
    is_name = _HUB_NAME.fullmatch(str(path)) and str(path.parent) != "models"  # where presets have their models
    return f"hf download {path} --local-dir DIR" if is_name else ""


def check_hf_dir(path: str | Path, *, quantized: bool = False) -> HFDir:
    """Check everything that can be checked from headers, and that a stored output layer is the embedding if it is tied.

    With `quantized` it may be a directory written by `oblr-megatron quantize`; `shapes` leaves out its scales.

    Raises:
        UserError: names the first problem, the file and the fix.
    """
    path = Path(path)
    if not os.path.isdir(path):  # unlike Path.is_dir, for any name
        what = "the model path is a file" if os.path.exists(path) else "the model directory does not exist"
        fix = f"give the directory of a checkpoint{searched_from(path)}"
        if download := _download(path):
            fix += f"; download a model of the hub first ({download})"
        raise UserError(what, where=str(path), fix=fix)
    config = check_hf_files(path)
    listed = listed_tensors(path)
    is_quantized = config.get(QUANTIZATION) is not None  # transformers refuses an empty table
    shapes, dtypes, num_bytes = _check_weights(path, listed, DTYPE_BYTES | (FP8_BYTES if is_quantized else {}))
    if is_quantized:
        method = dict(config[QUANTIZATION] or {}).get("quant_method")
        if not quantized or method != "modelopt":
            what = f"the weights are quantised ({method})"
            raise UserError(what, where=str(path / "config.json"), fix=UNQUANTIZED)
        shapes = {name: size for name, size in shapes.items() if not name.endswith(SCALES)}
    check_tensors(config, shapes, path)
    files = tuple(sorted(listed)) if listed else (SINGLE,)
    _check_alone(path, listed)
    tied = bool(config.get("tie_word_embeddings", False))
    if tied and HF_OUTPUT in shapes:
        _check_tied_head(path, files)
    return HFDir(path, config, files, shapes, tied, num_bytes, dtypes)


def copied_files(path: Path) -> dict[str, bytes]:
    """Contents of the files of `COPIED` and `TEMPLATES` that a directory has, by name inside it, with "/"."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in _copied_in(path)}


def _copied_in(path: Path) -> Iterator[Path]:
    named = (path / name for name in COPIED)
    yield from (file for file in (*named, *sorted((path / TEMPLATES).glob("*.jinja"))) if file.is_file())


def checkpoint_shapes(path: Path, *, quantized: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that an engine loads from a Hugging Face directory, read from headers.

    A stored output layer that the model ties to the embedding is left out, because no engine holds it. `quantized` as
    of `check_hf_dir`.

    Raises:
        UserError: the directory is not a complete checkpoint.
    """
    source = check_hf_dir(path, quantized=quantized)
    return {name: size for name, size in source.shapes.items() if not (source.tied and name == HF_OUTPUT)}


def check_hf_files(path: Path) -> dict[str, Any]:
    """Check config.json and tokenizer of a directory, but not the weights; return the config.

    Raises:
        UserError: names what is missing or wrong, and the file.
    """
    if not (path / "config.json").exists() and (other := format_in(path)):
        raise UserError(f"config.json is missing; the directory holds {other[0]}", where=str(path), fix=other[1])
    config = _read_config(path / "config.json")
    if not any(all((path / name).is_file() for name in names) for names in TOKENIZER_FILES):
        wanted = " or ".join(" with ".join(names) for names in TOKENIZER_FILES)
        fix = "copy the tokenizer files here"
        if (path / "tokenizer.model").is_file():
            fix = (
                "convert tokenizer.model (AutoTokenizer.from_pretrained, then save_pretrained; it needs sentencepiece)"
            )
        raise UserError(f"no tokenizer: {wanted} is missing", where=str(path), fix=fix)
    for file in _copied_in(path):  # also optional files: otherwise every save of a run would fail
        if not os.access(file, os.R_OK):
            raise UserError("cannot read the file: no permission", where=str(file), fix="make it readable")
        refuse_pointer(file)
    return config


def model_config(model: str | Path) -> dict[str, Any]:
    """The checked config.json of a directory, which needs no weights and no tokenizer, or the published one of a name.

    Raises:
        UserError: neither, or config.json is damaged or of another architecture.
    """
    file = Path(model) / "config.json"
    return _read_config(file) if file.is_file() else published(str(model))


def _read_config(file: Path) -> dict[str, Any]:
    config = read_json(file)
    if "run_dir" in config and "model_type" not in config:
        fix = f"give its model: {file.parent / 'hf'}, or what `oblr-megatron convert to-hf` makes of a checkpoint"
        raise UserError("this is the directory of a run, not of a model", where=str(file), fix=fix)
    family_of(config, where=str(file))
    _check_values(config, file)
    return config


def read_json(file: Path) -> dict[str, Any]:
    """An object of a JSON file of a model or an adapter.

    Raises:
        UserError: the file is missing, cannot be read, is a Git LFS pointer, or holds something else.
    """
    try:
        refuse_pointer(file)
        content = json.loads(file.read_bytes().decode())
    except PermissionError as error:
        raise UserError("cannot read the file: no permission", where=str(file), fix="make it readable") from error
    except OSError as error:
        raise UserError(f"{file.name} is missing", where=str(file.parent), fix="complete the directory") from error
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or thousands of brackets
        raise UserError(f"the file is not JSON: {error}", where=str(file), fix=AGAIN) from error
    if not isinstance(content, dict):
        raise UserError("the file is not a JSON object", where=str(file), fix=AGAIN)
    return content


def _check_values(config: dict[str, Any], file: Path) -> None:
    """The values that our own code reads; transformers checks the types of all."""
    experts, states = num_experts(config), family_of(config).states_head_dim or config.get("head_dim") is not None
    more = (*(("head_dim",) if states else ()), *(("moe_intermediate_size",) if experts else ()))
    values = {name: config.get(name) for name in (*SIZES, *more)}
    wrong = {name: value for name, value in values.items() if type(value) is not int or value < 1}
    tables = {name: config.get(name) or {} for name in (*ROPES, QUANTIZATION)}
    wrong |= {name: value for name, value in tables.items() if not isinstance(value, dict)}
    numbers = {name: config.get(name, 1) for name in ("rms_norm_eps", "rope_theta", "max_position_embeddings")}
    for name in (name for name in ROPES if name not in wrong):
        numbers |= {f"{name}.{key}": tables[name].get(key, 1) for key in ("rope_theta", "factor")}
    wrong |= {name: value for name, value in numbers.items() if not _is_positive(value)}
    wrong |= {"num_experts": experts} if type(experts) is not int or experts < 0 else {}
    tied = config.get("tie_word_embeddings", False)
    wrong |= {} if isinstance(tied, bool) else {"tie_word_embeddings": tied}
    for name, value in wrong.items():
        raise UserError(f"{name} is {value!r:.60}", where=str(file), fix=OWN_CONFIG)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf


def listed_tensors(path: Path) -> dict[str, set[str]]:
    """The tensors of each shard, from the index; {} for a single file without index.

    Raises:
        UserError: there are no weights, or the index is damaged or names missing files.
    """
    if not (path / INDEX).exists():
        if (path / SINGLE).is_file():
            return {}
        form, fix = format_in(path) or ("", "complete the directory")
        what = f"no weights: neither {SINGLE} nor {INDEX} exists" + (f"; the directory holds {form}" if form else "")
        raise UserError(what, where=str(path), fix=fix)
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("the index has no weight_map", where=str(path / INDEX), fix="download the index again")
    listed: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        listed.setdefault(str(shard), set()).add(tensor)
    absent = [shard for shard in sorted(listed) if not os.path.isfile(path / shard)]
    if absent:
        what = f"{len(absent)} of {len(listed)} shards are missing, {absent[0]!r} first"
        raise UserError(what, where=str(path / INDEX), fix="download the missing files")
    return listed


def _check_alone(path: Path, listed: Collection[str]) -> None:
    """Refuse files that another program loads in addition to ours, or instead of them; `listed` are an index's shards.

    vLLM loads all *.safetensors without an index, and consolidated ones of Mistral. For these it also searches
    subdirectories, and then reads the directory in Mistral's own format. transformers prefers SINGLE to an index.
    """
    others = [] if listed else [file for file in path.glob("*.safetensors") if file.name != SINGLE]
    for file in sorted([*path.rglob("consolidated*.safetensors"), *others]):
        what = f"vLLM would load this file, too, or instead of {INDEX if listed else SINGLE}"
        raise UserError(what, where=str(file), fix="move it to another directory")
    if listed and set(listed) != {SINGLE} and (path / SINGLE).exists():
        what = f"transformers would load this file instead of {INDEX}, which vLLM and the trainer read"
        raise UserError(
            what, where=str(path / SINGLE), fix=f"move it, or {INDEX} with its shards, to another directory"
        )


def _check_weights(
    path: Path, listed: dict[str, set[str]], dtypes: Collection[str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], int]:
    """Read every header; return (shape and dtype of every tensor, bytes of all files)."""
    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, str] = {}
    num_bytes = 0
    for name in sorted(listed) or [SINGLE]:
        file = path / name
        held = {name: entry for name, entry in read_header(file)[1].items() if not name.endswith(BUFFERS)}
        for tensor, entry in held.items():
            if entry["dtype"] not in dtypes:
                what = f"{tensor!r} has dtype {entry['dtype']}, but only {', '.join(dtypes)} can be read"
                raise UserError(what, where=str(file), fix=UNQUANTIZED)
        lacking = sorted(tensor for tensor in listed.get(name, set()) - held.keys() if not tensor.endswith(BUFFERS))
        if lacking:
            what = f"the shard lacks {len(lacking)} tensors that the index names, {lacking[0]!r} first"
            raise UserError(what, where=str(file), fix="download index and shards of one version")
        shapes |= {tensor: tuple(entry["shape"]) for tensor, entry in held.items()}
        stored |= {tensor: entry["dtype"] for tensor, entry in held.items()}
        num_bytes += file.stat().st_size
    return shapes, stored, num_bytes


def _check_tied_head(path: Path, files: Collection[str]) -> None:
    """Refuse a tied model whose stored output layer differs from the embedding: vLLM would load it, pushes never."""
    places = {}
    for file in (path / name for name in files):
        start, entries = read_header(file)
        for name in entries.keys() & {HF_EMBEDDING, HF_OUTPUT}:
            begin, end = entries[name]["data_offsets"]
            places[name] = (file, file.stat().st_mtime_ns, start + begin, end - begin, entries[name]["dtype"])
    if not _equal_bytes(places[HF_EMBEDDING], places[HF_OUTPUT]):
        what = f"config.json ties the output layer to the embedding, but the files have another {HF_OUTPUT!r}"
        fix = f'set "tie_word_embeddings": false in config.json, or remove {HF_OUTPUT!r} from the files'
        raise UserError(what, where=str(path), fix=fix)


@lru_cache(maxsize=8)
def _equal_bytes(one: Place, other: Place) -> bool:
    """Whether two tensors have one dtype and equal bytes. A directory is checked several times, and read once."""
    if one[3:] != other[3:]:
        return False
    with one[0].open("rb") as first, other[0].open("rb") as second:
        first.seek(one[2])
        second.seek(other[2])
        sizes = (min(COMPARED_BYTES, one[3] - done) for done in range(0, one[3], COMPARED_BYTES))
        return all(first.read(size) == second.read(size) for size in sizes)


def check_tensors(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare the tensors in the files with those that config.json implies.

    Raises:
        UserError: a tensor is missing or unknown, or has another shape.
    """
    shape = ModelShape.of(config)
    if shape.layers * max(shape.experts, 1) > len(shapes) + 10**5:  # before a table with billions of rows is made
        what = (
            f"num_hidden_layers {shape.layers}, num_experts {shape.experts}, but the files have {len(shapes)} tensors"
        )
        raise UserError(what, where=str(path), fix=OWN_CONFIG)
    expected = {name: size for item in table(shape) for name, size in zip(item.hf, item.shapes, strict=True)}
    allowed = {HF_OUTPUT} if config.get("tie_word_embeddings") else set()  # some tied checkpoints store it as well
    unknown = [name for name in shapes if name not in expected and name not in allowed]
    missing = [name for name in expected if name not in shapes]
    for names, state, fix in (
        (unknown, "do not belong to this model", remedy_for_names(unknown, expected)),
        (missing, "are missing from the weights", "give a complete checkpoint with its own config.json"),
    ):
        if names:
            raise UserError(f"{len(names)} tensors {state}, {names[0]!r} first", where=str(path), fix=fix)
    for name, size in expected.items():
        if shapes[name] != tuple(size):
            what = f"{name!r} has shape {list(shapes[name])}, but config.json implies {list(size)}"
            raise UserError(what, where=str(path), fix=OWN_CONFIG)
