"""Sizes of working buffers, shared by the code that allocates them and by the memory model. Imports no torch."""

from __future__ import annotations

KEPT_BYTES = 2**29
"""Bytes of partial gradients and embedding rows that a norm pass keeps until their all-reduce (two_pass.py)."""
CPU_SQUARE_CHUNK, GPU_SQUARE_CHUNK = 2**18, 2**22
"""Elements converted to fp64 at a time: 2 and 32 MiB, which stay in cache between both reads (model/sq_norms.py)."""
BLOCK_LOGITS = {False: 2**22, True: 2**27}
"""Logits of a block of the output layer, on a CPU and on a GPU (model/lm_head.py)."""
KEPT_LOGITS = {False: 2**26, True: 2**28}
"""Logits that the output layer keeps for backward; it computes the others again."""
CPU_TILE_SIDE, GPU_TILE_SIDE = 512, 4096
"""Side of a tile [side, side] of dy^T x (norms/products.py)."""
CPU_STEP_TOKENS = 4096
"""Tokens that a CPU engine computes in one step, unless `cpu_step_tokens` needs more."""
BUCKET_BYTES = 8 * 2**20
"""Of each of the two buckets of a push (rollout/push.py); CUDA IPC needs room for the largest tensor."""
PIECE_BYTES = 512 * 2**20
"""Of the weights that the trainer's ranks gather with one message; more for a larger parameter (weights/pieces.py)."""


def cpu_step_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """Tokens that an engine computes in one step if it splits no prompt. vLLM needs one for each sequence."""
    return max(CPU_STEP_TOKENS, max_model_len, max_num_seqs)
