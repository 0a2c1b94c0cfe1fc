"""TensorBoard event files, written without torch and without TensorFlow.

``tensorboard --logdir RUN_DIR/tensorboard`` shows them.
"""

from __future__ import annotations

import json
import time
from typing import Any

from llmx.run.metrics.lines import Record, event_scalars, scalars, step_of
from llmx.tracking.base import RunMeta, Tracker


class TensorBoardTracker(Tracker):
    """Writes the scalars of a run into ``RUN_DIR/tensorboard/events.out.tfevents.*``."""

    name = "tensorboard"

    def start(self, meta: RunMeta) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._meta, self._directory = meta, meta.run_dir / "tensorboard"
        # Event files only ever grow: what an earlier tracker process of this run left would show
        # every point twice.
        for stale in self._directory.glob("events.out.tfevents.*"):
            stale.unlink()
        self._writer: Any = EventFileWriter(str(self._directory), flush_secs=10)
        for name in ("config", "ds_config", "provenance"):
            values = getattr(meta, name)
            text = json.dumps(values, indent=2, ensure_ascii=False)
            self._text(name, "\n".join("    " + line for line in text.splitlines()))
        self._writer.flush()
        command = f"tensorboard --logdir {self._directory}"
        self.report("writing", command, where=str(self._directory))

    def log(self, record: Record) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto

        values = scalars(record) or event_scalars(record)
        if values:
            parts = [SummaryProto.Value(tag=k, simple_value=v) for k, v in values.items()]
            self._event(
                SummaryProto(value=parts), step=step_of(record), wall_time=record.get("time")
            )

    def rewind(self, step: int) -> None:
        """Tell TensorBoard to forget later steps: a session that starts at the next one."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def finish(self, result: Record | None) -> None:
        rows = "\n".join(f"| {k} | {v} |" for k, v in self.summary(self._meta, result).items())
        self._text("result", f"| what | value |\n|---|---|\n{rows}")
        self._writer.flush()
        self._writer.close()
        command = f"tensorboard --logdir {self._directory}"
        self.report("finished", command, where=str(self._directory))

    def _text(self, tag: str, markdown: str) -> None:
        """One entry of TensorBoard's text page: a string tensor marked for its text plugin."""
        from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=TensorShapeProto(),
        )
        metadata = create_summary_metadata(display_name=tag, description="")
        value = SummaryProto.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._event(SummaryProto(value=[value]), step=0, wall_time=None)

    def _event(self, summary: Any, *, step: int, wall_time: float | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=wall_time or time.time(), step=step, summary=summary)
        self._writer.add_event(event)
