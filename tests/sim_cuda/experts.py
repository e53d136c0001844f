"""Run on one or two ranks with the simulated device and Transformer Engine's Python: norms of a mixture's samples.

    python -m tests.sim_cuda.experts MODEL_DIRECTORY

Its grouped layers compute the experts, which several ranks share. Prints {MODE: norms}, and on one rank those of the
gradient that plain training would apply.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from oblr_megatron.config import ParallelConfig
from oblr_megatron.model.parallel import initialize, shutdown
from tests.gpu.test_gradnorm_gpu import config_of, load, norms_of_gradients, step_norms


def main(directory: str) -> None:
    """All modes that experts on several ranks allow."""
    path, found = Path(directory), {}
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    options = ParallelConfig(expert_model_parallel_size=world_size)
    parallel = initialize(options)
    for mode in ("two_pass", "bookkeep", "inline"):
        config = config_of(path, "bfloat16", "two_pass", transformer_impl="transformer_engine")
        rule = {"snr": config.algo.snr.model_copy(update={"num_folds": 1})}
        rule |= {"baseline": "pooled"} if mode == "inline" else {}
        parts = {"algo": config.algo.model_copy(update=rule), "parallel": options}
        config = config.model_copy(update=parts | {"gradnorm": config.gradnorm.model_copy(update={"mode": mode})})
        policy = load(path, parallel, config)
        kinds = {type(module).__name__ for module in policy.modules[0].decoder.modules()}
        assert any("GroupedLinear" in kind for kind in kinds), kinds
        found[mode] = step_norms(policy, config).tolist()
        if world_size == 1:
            found["gradient"] = norms_of_gradients(policy).tolist()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
