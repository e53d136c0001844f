"""The configuration's sections about data: training sources, what is kept out of them, held-out sets. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from oblr_megatron.config.section import Section

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
"""The benchmarks with a convention of their own; the conventions themselves are in data/conventions.py."""


class SourceConfig(Section):
    """One data set. A string in its place is its path."""

    path: str
    """A JSONL or parquet file (or a pattern such as "data/*.parquet"), a directory that `datasets` loads, the name of a
    set on the Hugging Face hub, or that of a convention (docs/data.md), which stands for its set on the hub."""
    convention: str = ""
    """How the benchmark writes rows and answers, e.g. "gsm8k", "aime" (table in docs/data.md): columns, where the gold
    answer stands, tolerance. Empty: plain columns, exact answers."""
    subset: str = ""
    """Configuration of a hub data set, e.g. "main"; by default the convention's."""
    split: str = ""
    """Split of a hub data set or of a directory; by default the convention's (to train on in data.train, to evaluate on
    elsewhere), else "train"."""
    revision: str = ""
    """Commit or tag of a hub data set."""
    question_column: str | None = None
    """Column that holds the question; by default the convention's, else data.question_column."""
    answer_column: str | None = None
    """Column that holds the gold answer; by default the convention's, else data.answer_column."""
    weight: float | None = Field(None, gt=0)
    """Share of training prompts that come from here, relative to the other sources; give it to all of them or to none.
    By default a source counts by its rows."""


def _as_source(value: Any) -> Any:
    return {"path": str(value)} if isinstance(value, (str, Path)) else value


def _as_sources(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path, dict)) else value


Source = Annotated[SourceConfig, BeforeValidator(_as_source)]
Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_sources)]


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt."""

    train: Sources = Field(min_length=1)
    """Training rows: a path, or several sources ([[data.train]] tables) mixed by their weights. Rows with a true
    overlaps_benchmark column are left out."""
    question_column: str = "question"
    """Column that holds the question: text, or a list of chat messages. "a.b" is field b of column a."""
    answer_column: str = "answer"
    """Column that holds the gold answer; "a.b" is field b of column a."""
    template: str = "{question}"
    """Prompt text; {question} is replaced. With chat_template, the text of the user turn."""
    chat_template: bool = False
    """Write the prompt as one user turn with the tokenizer's own chat template."""
    chat_template_options: dict[str, Any] = Field({})
    """Given to the chat template, e.g. {enable_thinking = false} for Qwen3."""
    system_prompt: str = ""
    """System turn put first when chat_template is true and this is not empty."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Rows whose prompt is longer are skipped and counted."""
    shuffle: bool = True
    """Shuffle every epoch by the run's seed."""
    deduplicate: bool = True
    """Leave out training rows whose question occurred before, and all rows of a question with contradicting answers."""
    exclude: Sources = ()
    """Benchmarks whose questions are kept out of training, beside those of evaluate.data."""
    overlap_ngram: int = Field(10, ge=1)
    """Words of a shingle, by which training questions are held against benchmarks; shorter questions must be equal."""
    overlap_threshold: float = Field(0.5, ge=0, le=1)
    """A training row that holds at least this share of a benchmark question's shingles is left out; 0 keeps all."""


class EvaluateConfig(Section):
    """Held-out accuracy during training, and the settings of `oblr-megatron eval`."""

    data: dict[str, Source] = Field({})
    """Named sets, e.g. {gsm8k = "gsm8k_test.jsonl"}; the same template as data, and its columns unless a set says
    otherwise. A set with the name of a convention follows it."""
    every_steps: int = Field(0, ge=0)
    """Evaluate every so many steps (and before the first and after the last); 0 turns it off."""
    num_prompts: int | None = Field(None, ge=1)
    """Use only the first so many usable rows of every set."""
    samples_per_prompt: int = Field(1, ge=0)
    """k: sampled responses a prompt, for mean@k, pass@k and maj@k; 0 for the greedy one alone."""
    temperature: float = Field(1.0, ge=0.01)
    """Temperature of the sampled responses; greedy accuracy is reported beside it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus filter of the sampled responses."""
    top_k: int = Field(-1, ge=-1)
    """Top-k filter of the sampled responses, -1 for none."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Length at which a response is cut; by default rollout.max_response_tokens."""
    save: bool = True
    """Write every response with its verdict to RUN_DIR/evaluations/step_000020/SET.jsonl."""

    @field_validator("data")
    @classmethod
    def _by_their_names(cls, sets: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        """A set that has the name of a convention is read by it, as on a command line."""
        named = {name: source.model_copy(update={"convention": name}) for name, source in sets.items()}
        return {
            name: named[name] if name in CONVENTION_NAMES and not source.convention else source
            for name, source in sets.items()
        }
