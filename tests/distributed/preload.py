"""What the server that ranks are forked from has imported: whatever they would otherwise each import anew."""

from __future__ import annotations

import gc

import pytest  # noqa: F401  every module of tests imports it
import torch
import torch.utils.serialization

import oblr_megatron.cli
import oblr_megatron.train
import tests.distributed.passes
import tests.live
import tests.tiny  # noqa: F401

# gc.collect()
# gc.freeze()  # a rank's collector shall not touch, and so copy, what it shares with the server
