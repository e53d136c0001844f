"""tensorboard: RUN_DIR/tensorboard, one scalar a metric and one text an alarm. Needs neither torch nor tensorflow."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from oblr_megatron.observe.trackers.base import State, TrackedRun, Tracker


class TensorboardTracker(Tracker):
    """Writes event files; see `Tracker`. After a resume, tensorboard hides what was logged after the checkpoint."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))
        if run.resume_step is not None:
            self._add(run.resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=scalars))

    def alarm(self, step: int, name: str, text: str) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag=f"alarm/{name}", metadata=metadata, tensor=tensor)
        self._add(step, summary=Summary(value=[value]))

    def close(self, state: State) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Summary | SessionLog) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()
