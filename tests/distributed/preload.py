"""Everything the fork server imports once, so that forked ranks need not."""

from __future__ import annotations

import pytest  # noqa: F401  every module of tests imports it
import torch.utils.serialization  # noqa: F401  of a checkpoint's writing

from oblr_megatron import cli, step_loop  # noqa: F401
from tests import live, oracle, tiny  # noqa: F401
from tests.distributed import passes  # noqa: F401
