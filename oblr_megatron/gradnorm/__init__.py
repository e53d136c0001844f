"""Exact squared gradient norms of single responses, over all parameters, in every parallel layout.

    w_i = ||grad_theta sum_t rho_t log pi(o_t | q, o_<t)||^2

For each parameter: sum the partial gradients of one sample over ranks, square, and count each shard once.

In reading order:

    rules           how each parameter's gradient is spread over ranks: shard, partial or copy
    segments        per-sample weight gradients from the factors x and dy; pure functions
    products        ||dy^T x||^2 in tiles, by the cheaper of two methods
    norm_sink       receives x and dy during backward and passes on squared norms
    accumulate      sums each sample's squared norms on one rank; buffers what other ranks must add to first
    embedding_rows  the buffered rows of the embedding and of a tied output layer
    reduce          combines the ranks
    sketch          cheaper estimates by random projection
    oracle          the same norms, slow and obvious: one autograd call a sample
"""
