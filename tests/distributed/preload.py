"""Everything the fork server imports once, so that forked ranks and engines need not."""

from __future__ import annotations

import gc
import os

from oblr_megatron.runtime.garbage import no_collection

with no_collection():
    import pytest  # noqa: F401  every module of tests imports it
    import torch.utils.serialization  # noqa: F401  of a checkpoint's writing

    from oblr_megatron import cli, step_loop  # noqa: F401
    from tests import live, oracle, tiny  # noqa: F401
    from tests.distributed import passes  # noqa: F401

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as engines have it (engine/handle.py): decorators read it
    import vllm.entrypoints.llm
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from oblr_megatron.engine import core, plugin, transfer, worker  # noqa: F401
    from oblr_megatron.extras.speculation import draws  # noqa: F401

    del os.environ["TORCHDYNAMO_DISABLE"]

gc.freeze()  # forked processes need not look through the imports, and keep their memory shared
