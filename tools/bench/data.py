"""Measure how long a run takes to open its data (reading, deduplication, overlaps, templates, tokens), and its memory.

    python tools/bench/data.py --train dapo.jsonl gsm8k_train.jsonl --exclude gsm8k_test.jsonl --tokenizer MODEL_DIR

Without --tokenizer, a byte-level BPE tokenizer of 16,000 tokens is trained on the training rows.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oblr_megatron.config.data import DataConfig
from oblr_megatron.data.prompts import PromptStream
from oblr_megatron.data.rows import plain_text, read_rows


def main() -> None:
    """Print seconds, rows and resident memory for each way to open the sources."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", nargs="+", required=True, metavar="PATH", help="training sources")
    parser.add_argument("--exclude", nargs="*", default=[], metavar="PATH", help="benchmarks to exclude")
    parser.add_argument("--tokenizer", metavar="DIR", help="Hugging Face directory")
    options = parser.parse_args()
    plain = DataConfig.model_validate({"train": options.train, "deduplicate": False})
    tokenizer = _tokenizer(options.tokenizer, plain)
    for _ in _opened(plain, tokenizer):  # warm up: imports and the tokenizer's threads
        pass
    cases = {
        "as they are": {},
        "without duplicates": {"deduplicate": True},
        "without duplicates and overlaps": {"deduplicate": True, "exclude": options.exclude},
    }
    for name, changes in cases.items():
        for seconds, stream in _opened(DataConfig.model_validate({**plain.model_dump(), **changes}), tokenizer):
            print(f"{name}: {seconds:.1f} s, {len(stream)} prompts, {stream.num_skipped} rows skipped")
    print(f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def _opened(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[float, PromptStream]]:
    start = time.perf_counter()
    stream = PromptStream(config, tokenizer, seed=0)
    yield time.perf_counter() - start, stream


def _tokenizer(directory: str | None, config: DataConfig) -> PreTrainedTokenizerBase:
    if directory is not None:
        return AutoTokenizer.from_pretrained(directory)
    texts = (plain_text(row.question) for source in config.train for row in read_rows(source, config, []))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=16_000, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)


if __name__ == "__main__":
    main()
