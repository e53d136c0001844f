"""Sections [data] and [evaluate]: training sources, decontamination, held-out sets. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from oblr_megatron.config.section import MOST_RESPONSES, Section, written_out

CONVENTION_NAMES = (
    "gsm8k",
    "math",
    "math500",
    "aime",
    "aime24",
    "aime25",
    "amc",
    "amc23",
    "olympiadbench",
    "minerva",
    "dapo",
)
"""Benchmarks with their own format; data/conventions.py defines each."""


GYM_PREFIX = "reasoning_gym:"
MOST_ROWS = 1_000_000
"""Most rows of a generated source; each seed has a range of its own (extras/gym/rows.py)."""
LONGEST_NAME = 200  # bytes of a set's name: it is a part of file names
STORED_KEYS = ("convention", "subset", "split", "revision", "question_column", "answer_column")
GENERATED_KEYS = ("size", "seed", "options")


class SourceConfig(Section):
    """One data set. A plain string is read as its path."""

    path: Annotated[str, AfterValidator(written_out)]
    """A JSONL or parquet file, a pattern such as "data/*.parquet", a directory that `datasets` loads, a data set on the
    Hugging Face hub, the name of a convention, or "reasoning_gym:NAME" (docs/data.md)."""
    size: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Rows to generate, of a reasoning_gym source; by default 5000 in data.train and 500 elsewhere."""
    seed: int = Field(0, ge=0, le=2000)
    """Seed of a reasoning_gym source. The same seed gives other rows in data.train than elsewhere."""
    options: dict[str, Any] = Field({})
    """Options of a reasoning_gym task, e.g. {max_value = 100}."""
    convention: str = ""
    """Format of a benchmark, e.g. "gsm8k" or "aime" (table in docs/data.md). Empty: plain columns, exact answers."""
    subset: str = ""
    """Configuration of a hub data set, e.g. "main"; by default the convention's."""
    split: str = ""
    """Split of a hub data set or a directory; a file has none. By default the convention's training split in data.train
    and its test split elsewhere; "train" without a convention."""
    revision: str = ""
    """Commit or tag of a hub data set."""
    question_column: str | None = None
    """Column of the question; by default the convention's, else data.question_column."""
    answer_column: str | None = None
    """Column of the gold answer; by default the convention's, else data.answer_column."""
    weight: float | None = Field(None, gt=0)
    """Relative share of the training prompts. Set it for all sources or for none; by default sources are mixed by their
    number of rows."""

    @property
    def gym_task(self) -> str:
        """NAME of a source "reasoning_gym:NAME"; else empty."""
        return self.path.removeprefix(GYM_PREFIX) if self.path.startswith(GYM_PREFIX) else ""

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Self:
        """Generated rows have no columns to choose; stored rows have no seed."""
        generated = self.path.startswith(GYM_PREFIX)
        if generated and not self.gym_task:
            raise ValueError(f"{self.path!r} names no task; write e.g. {GYM_PREFIX}gcd")
        for key in STORED_KEYS if generated else GENERATED_KEYS:
            if getattr(self, key) != type(self).model_fields[key].default:
                kind = (
                    f"is of no use to the generated rows of {self.path!r}" if generated else f"needs {GYM_PREFIX}NAME"
                )
                raise ValueError(f"{key} {kind}; leave it out")
        return self


def _as_source(value: Any) -> Any:
    return {"path": str(value)} if isinstance(value, (str, Path)) else value


def _as_sources(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path, dict)) else value


Source = Annotated[SourceConfig, BeforeValidator(_as_source)]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_sources)]


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    train: Sources = Field(min_length=1)
    """Training rows: one path, or several sources ([[data.train]] tables) mixed by their weights. Rows where a column
    overlaps_benchmark is true are dropped."""
    question_column: str = "question"
    """Column of the question: text, or a list of chat messages. "a.b" is field b of column a."""
    answer_column: str = "answer"
    """Column of the gold answer. "a.b" is field b of column a."""
    keep_columns: bool = False
    """Keep all columns of each row. A reward that takes them sets this itself; set it to save rollouts that such a
    reward will replay."""
    template: str = "{question}"
    """Prompt text; {question} is replaced. With chat_template, the text of the user turn."""
    chat_template: bool = False
    """Write the prompt as one user turn with the tokenizer's chat template."""
    chat_template_options: dict[str, Any] = Field({})
    """Arguments of the chat template, e.g. {enable_thinking = false} for Qwen3. Needs chat_template."""
    system_prompt: str = ""
    """Text of a system turn. Needs chat_template. Empty: no system turn."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Rows with longer prompts are skipped and counted."""
    shuffle: bool = True
    """Shuffle every epoch with the run's seed."""
    deduplicate: bool = True
    """Drop training rows with a repeated question, and all rows of a question with contradicting answers."""
    exclude: Sources = ()
    """More benchmarks to keep out of the training data. The sets of evaluate.data are always kept out."""
    overlap_threshold: float = Field(0.5, ge=0, le=1)
    """Drop a training row that contains at least this share of a benchmark question's runs of 10 words. 0 keeps all
    rows."""


class EvaluateConfig(Section):
    """Held-out accuracy during training, and the settings of `oblr-megatron eval`."""

    data: dict[str, Source] = Field({})
    """Named sets, e.g. {gsm8k = "gsm8k_test.jsonl"}. They use the template and columns of [data] unless a set has its
    own. A set named like a convention follows that convention."""
    every_steps: int = Field(0, ge=0)
    """Evaluate every this many steps, before the first and after the last. Needs data. 0: never."""
    num_prompts: int | None = Field(None, ge=1)
    """Use only the first this many usable rows of each set."""
    samples_per_prompt: int = Field(1, ge=0, le=MOST_RESPONSES)
    """k: sampled responses per prompt, for mean@k, pass@k and maj@k. 0: only the greedy response."""
    temperature: float = Field(1.0, ge=0.01, le=2)
    """Temperature of the sampled responses, up to 2. Greedy accuracy is always reported as well."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus filter of the sampled responses."""
    top_k: int = Field(-1, ge=-1)
    """Top-k filter of the sampled responses, -1 for none."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response; by default rollout.max_response_tokens."""

    @field_validator("data")
    @classmethod
    def _by_their_names(cls, sets: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        """Give a set named like a convention that convention, as on a command line."""
        files = [name.replace("/", "__") for name in sets]  # their responses' files
        fits = all(0 < len(file.encode(errors="replace")) <= LONGEST_NAME and file.isprintable() for file in files)
        if len(set(files)) < len(files) or not fits:
            raise ValueError(
                f"names must have 1 to {LONGEST_NAME} bytes, and differ also with '__' for '/'; "
                "control characters are refused"
            )
        named = {name: source.model_copy(update={"convention": name}) for name, source in sets.items()}
        return {
            name: named[name] if name in CONVENTION_NAMES and not (source.convention or source.gym_task) else source
            for name, source in sets.items()
        }
