"""The two files of a checkpoint that are not tensors are the same bytes under every megatron-core, and it reads them.

Not covered: a checkpoint of another version as a whole (tests/distributed/test_other_megatron.py).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.serialization import load_common_state_dict

from oblr_megatron.checkpoint.torch_files import save_common

STATE: dict[str, Any] = {"optimizer": {"param_groups": [{"lr": 0.25, "step": 3}]}, "model0": {}}
DESCRIPTION = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)


def test_the_description_is_that_of_0_16(tmp_path: Path) -> None:
    save_common({}, tmp_path)
    assert (tmp_path / "metadata.json").read_bytes() == DESCRIPTION


def test_the_common_file_is_torchs_archive_of_that_name(tmp_path: Path) -> None:
    save_common(STATE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["common.pt", "metadata.json"]
    assert "common/data.pkl" in zipfile.ZipFile(tmp_path / "common.pt").namelist()
    assert torch.load(tmp_path / "common.pt", weights_only=True) == STATE


def test_the_installed_megatron_core_reads_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_common(STATE, tmp_path)
    config = maybe_load_config(str(tmp_path))
    assert config is not None and (config.sharded_backend, config.sharded_backend_version) == ("torch_dist", 1)
    assert load_common_state_dict(str(tmp_path)) == STATE
    assert caplog.messages == []


def test_a_directory_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save_common(STATE, tmp_path / "missing")
