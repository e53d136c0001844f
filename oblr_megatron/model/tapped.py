"""This rank's part of a model with taps: what norms and gradients of single samples need of a model.

The trainer's `Policy` is one. The norms' library makes one from any GPTModel (`norms/attach.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from oblr_megatron.model.parallel import Parallel
    from oblr_megatron.model.taps import Tap
    from oblr_megatron.padding import Padding
    from oblr_megatron.types import TokenRows


@dataclass(slots=True)
class TappedModel:
    """This rank's part of the model, inside megatron-core's data-parallel wrapper (which holds `main_grad`).

    `chunks` are this rank's groups of consecutive layers in order: one, or vp_size under the interleaved schedule.
    Chunk c of pipeline stage s is group c * pp_size + s of the model.
    """

    chunks: list[DistributedDataParallel]
    transformer_config: TransformerConfig
    parallel: Parallel
    tap: Tap  # passes weight-gradient factors to the current sink
    padding: Padding  # of microbatches

    @property
    def modules(self) -> list[GPTModel]:
        """The unwrapped model of each chunk."""
        return [unwrapped(chunk) for chunk in self.chunks]

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer share their weight."""
        return any(module.share_embeddings_and_output_weights for module in self.modules)

    def no_loss(self, output: Tensor, batch: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
        """A zero loss that depends on the output, with gradient zero even for outputs that are not finite."""
        return output[..., :0].sum(), {}

    def zero_grad(self) -> None:
        """Set every `main_grad` to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def unwrapped(chunk: Any) -> Any:
    """The model inside megatron-core's wrappers: DistributedDataParallel, Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
