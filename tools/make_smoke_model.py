"""Write a Hugging Face directory with Qwen3-0.6B's architecture, random weights and a newly trained tokenizer.

    python tools/make_smoke_model.py --out run/smoke/model [--dtype bfloat16] [--texts FILE.jsonl]

It costs the time and memory of the real checkpoint, but generates noise. The architecture is the published config.json
of Qwen/Qwen3-0.6B (596,049,920 parameters). The tokenizer is a byte-level BPE trained on the given texts, because the
model's own vocabulary needs a download.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = "<|endoftext|>", "<|im_end|>"
MAX_TOKENS = 4096  # tokenizer size; the embedding keeps its 151,936 rows
SCALE = 0.02  # standard deviation of the weights
UNKNOWN_SCALE = 0.002  # standard deviation of embedding rows without a token, so that their logits stay near 0
FINAL_NORM = 10.0  # scales up the other rows' logits, so that ids without a token are almost never sampled
SAMPLE_TEXTS = Path(__file__).with_name("smoke_prompts.jsonl")


def main() -> None:
    """Write the directory; print its size and the time it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/smoke/model"), help="directory to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    parser.add_argument(
        "--texts", type=Path, default=SAMPLE_TEXTS, help="JSONL file; its questions train the tokenizer"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    options = parser.parse_args()
    start = time.perf_counter()
    count = make_model(options.out, dtype=options.dtype, texts=options.texts, seed=options.seed)
    print(f"wrote {options.out}: {count:,} parameters, {options.dtype}, in {time.perf_counter() - start:.0f} s")


def make_model(out: Path, *, dtype: str, texts: Path, seed: int) -> int:
    """Write config, generation config, tokenizer and weights; returns the number of parameters."""
    tokenizer = train_tokenizer(texts)
    config = qwen3_0_6b(tokenizer, dtype)
    tensors = random_weights(config, num_tokens=len(tokenizer), seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def qwen3_0_6b(tokenizer: PreTrainedTokenizerFast, dtype: str) -> Qwen3Config:
    """The published config, with the special token ids of our tokenizer."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )


def random_weights(config: Qwen3Config, *, num_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face name, without the tied lm_head. Norm weights are 1, except the last (FINAL_NORM)."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    assert isinstance(config.dtype, torch.dtype), f"dtype {config.dtype!r} was not resolved"
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():  # yields a tied weight once
        tensor = torch.ones(parameter.shape, dtype=config.dtype)
        if "norm" not in name:
            tensor.normal_(std=SCALE, generator=generator)
        tensors[name] = tensor
    tensors["model.norm.weight"] *= FINAL_NORM
    tensors["model.embed_tokens.weight"][num_tokens:] *= UNKNOWN_SCALE / SCALE
    return tensors


def train_tokenizer(texts: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE with an end-of-sequence and a padding token, at most MAX_TOKENS tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_questions(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def read_questions(path: Path) -> Iterator[str]:
    """The questions of a JSONL file, in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["question"]


if __name__ == "__main__":
    main()
