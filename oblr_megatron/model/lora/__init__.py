"""LoRA (arXiv 2106.09685): frozen linear layers of megatron-core, each with a trained pair A, B.

    y = W x + (alpha / rank) B (A x)              W [out, in] is frozen;  A [rank, in],  B [out, rank], B = 0 at first

    attach(model, config.lora)                    # before megatron-core's data-parallel wrapper
    initialize(policy, seed)

A and B are linear layers that taps know (`model/taps.py`), so norms, modes and layouts are those of any weight. Each
matrix of Hugging Face has its own pair. Tensor parallelism: if W is cut by rows, every rank holds all of A and its rows
of B; if W is cut by columns, its columns of A and all of B. Only vectors of length rank travel between ranks. The pair
of an expert is whole.

    linear      a linear layer that every tensor-parallel rank holds whole
    adapters    the pairs of a layer and of experts: attach, initialize, switch off, merge into W
"""
