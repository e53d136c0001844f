"""Exact squared gradient norms of single responses, over all parameters, in every parallel layout.

    w_i = ||grad_theta sum_t rho_t log pi(o_t | q, o_<t)||^2

The rule that makes them exact: sum every summand of one sample's gradient for one parameter, then square, then count
each shard once. `rules` says what each rank's gradient of a parameter is, `norm_sink` makes squares out of the factors
of weight gradients by the pure functions of `segments`, `capture` and `rows` take them down, `reduce` puts the ranks
together. `two_pass`, `bookkeep` and `stash` are three ways to the same norms and the same policy gradient; `reference`
is the oracle.
"""
