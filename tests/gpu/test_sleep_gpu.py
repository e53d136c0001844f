"""An engine on the trainer's GPU sleeps at both levels, takes a push and samples as before.

Not yet run on a GPU. Not covered: tensor-parallel engines, a wake that fails for lack of memory.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from oblr_megatron.errors import RunError
from oblr_megatron.rollout.colocated import ColocatedEngines
from tests.e2e.tiny_rollout import Weights, make_config, sample
from tests.tiny import make_hf_dir


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_freed_and_samples_stay_the_same(tmp_path: Path, level: int) -> None:
    """Sleep frees memory; after the push that wakes the engine, equal weights give equal samples."""
    path = make_hf_dir(tmp_path / "model", head_dim=64)
    parallel: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda", 0))
    engines = ColocatedEngines(make_config(path, tmp_path / "run", gpu_memory_utilization=0.2), parallel)
    try:
        source = Weights(Qwen3ForCausalLM.from_pretrained(path).cuda())
        engines.push(source, version=1)
        before = sample(engines)
        awake, _ = torch.cuda.mem_get_info()
        engines.sleep(level)
        asleep, total = torch.cuda.mem_get_info()
        assert asleep - awake > 0.1 * total, "most of the engine's share, the KV cache, is free"
        if level == 2:
            with pytest.raises(RunError, match="sleep level 2 dropped the weights"):
                sample(engines)
        engines.push(source, version=2)
        after = sample(engines)
        assert [one.response_ids for one in after] == [one.response_ids for one in before]
        assert {one.version for one in after} == {2}
    finally:
        engines.close()
