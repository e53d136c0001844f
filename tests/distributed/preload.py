"""What the server that ranks are forked from has imported: whatever each of them would otherwise import anew."""

from __future__ import annotations

import pytest  # noqa: F401  every module of tests imports it
import torch.utils.serialization  # noqa: F401

import oblr_megatron.cli
import oblr_megatron.train
import tests.distributed.passes
import tests.live  # noqa: F401
