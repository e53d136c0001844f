"""Where a step's prompts come from: the data, or saved steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from oblr_megatron.types import Prompt


class PromptSource(Protocol):
    """The source of a step's prompts: the data, or saved steps."""

    @property
    def epoch(self) -> int:
        """Completed passes over the data."""
        ...

    @property
    def num_skipped(self) -> int:
        """Rows of the data that were skipped."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the source, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position; UserError when the state belongs to other data."""
        ...
