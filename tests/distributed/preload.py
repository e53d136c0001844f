"""What the server that ranks are forked from has imported: whatever each of them would otherwise import anew."""

from __future__ import annotations

import pytest  # noqa: F401  every module of tests imports it
import torch.utils.serialization  # noqa: F401  of a checkpoint's writing

from oblr_megatron import cli, train  # noqa: F401
from tests import live, oracle, tiny  # noqa: F401
from tests.distributed import passes  # noqa: F401
