"""Exact squared gradient norms of single responses, over all parameters, in every parallel layout.

    w_i = ||grad_theta sum_t rho_t log pi(o_t | q, o_<t)||^2

The rule that makes them exact: sum every partial of one sample's gradient for one parameter, then square, then count
each shard once. `rules` says what each rank's gradient of a parameter is, `capture` takes it down at the end of a
sample's backward, `reduce` puts the ranks together, `two_pass` drives a pass, `reference` is the oracle.
"""

from oblr_megatron.gradnorm.two_pass import RatioFn, sample_sq_grad_norms

MODES = {"two_pass": sample_sq_grad_norms}
"""What `gradnorm.mode` names; every mode gives the same norms."""

__all__ = ["MODES", "RatioFn", "sample_sq_grad_norms"]
