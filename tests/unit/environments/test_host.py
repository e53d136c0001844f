"""The environment process as its host starts it.

Not covered: episodes (tests/e2e/test_environments.py), a fork server that dies (tests/unit/processes/test_client.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from oblr_megatron.config import parse_config
from oblr_megatron.environments.host import EpisodeHost
from oblr_megatron.environments.process import options_of
from oblr_megatron.errors import EngineDeadlineError, EnginesGoneError
from tests.tiny import make_hf_dir, make_tokenizer

FUNCTION = """
import os, sys
from pathlib import Path


def note():
    Path(__file__).with_suffix(".torch").write_text(str("torch" in sys.modules))


os.register_at_fork(before=note)


async def function(engine, prompt, seed):
    return None
"""


def test_the_process_needs_no_torch(tmp_path: Path) -> None:
    """It has the class of the model's tokenizer from the rank; transformers' search for it would import torch."""
    (tmp_path / "user.py").write_text(FUNCTION)
    make_hf_dir(tmp_path / "model", head_dim=32)
    make_tokenizer().save_pretrained(tmp_path / "model")
    table = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": "none", "chat_template": True, "chat_template_options": {"enable_thinking": False}},
        "rollout": {"environment": f"{tmp_path}/user.py:function", "max_response_tokens": 16},
        "reward": {"name": "environment"},
    }
    config = parse_config(table)
    assert options_of(config)["template_options"] == {"enable_thinking": False}
    host = EpisodeHost(config, index=0, owner="rank 0")
    try:
        worker = host._server.fork()
        assert psutil.Process(worker.pid).is_running()
        worker.socket.close()
    finally:
        host.close()
        host.close()
    assert (tmp_path / "user.torch").read_text() == "False"


def test_slow_episodes_do_not_count_as_a_lost_engine() -> None:
    """It would be restarted, and the same episodes would begin again."""
    host, late = EpisodeHost.__new__(EpisodeHost), EngineDeadlineError("rank 0", "the turns of engine 0", 1800.0)
    for waiting, kind in (({}, EnginesGoneError), ({3: (0, 0)}, EngineDeadlineError)):
        batch: Any = SimpleNamespace(waiting=waiting, running={0: None, 1: None})
        with pytest.raises(kind) as caught:
            host._handle(batch, (None, late))
        assert ("2 episodes" in str(caught.value)) is not bool(waiting)
