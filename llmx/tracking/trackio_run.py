"""One run of Trackio for one run of llmx and all its restarts.

Trackio keeps every line that it gets, so a step that it has is passed over.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from llmx.run.metrics.lines import Record, event_scalars, scalars, step_of
from llmx.tracking.base import RunMeta, Tracker, replay_command, why_not_online

HUB = "https://huggingface.co"
SPACE, SERVER, STORE = "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DIR"


class TrackioTracker(Tracker):
    """Writes to the Space or server of its variables, else to TRACKIO_DIR or RUN_DIR/trackio."""

    name = "trackio"
    needs = ("trackio",)
    compares_runs = True

    def start(self, meta: RunMeta) -> None:
        server = os.environ.get(SERVER, "").partition("?")[0]  # behind it: the write token
        if space := os.environ.get(SPACE, ""):
            server = f"{HUB}/spaces/{space}"
        why = why_not_online(server, meta) if server else ""
        if why or not server:
            for name in (SPACE, SERVER):
                os.environ.pop(name, None)
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask the Hub for the name of the user
        store = os.environ.setdefault(STORE, str(meta.run_dir / "trackio"))
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # stdout is the supervisor's
            module.print = _print_to_log
        self._trackio, self._last = trackio, dict[str, int]()
        self._run: Any = trackio.init(
            project=meta.project,
            # Two runs of llmx may have one name, and are two of Trackio.
            name=f"{meta.name} {meta.run_id}",
            group=meta.group,
            config={**meta.config, "ds_config": meta.ds_config},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._before: int = self._run._next_step - 1  # the last step of an earlier process
        show = f"{STORE}={store} trackio show --project {meta.project}"
        self._place = show if why or not server else server
        again = replay_command(meta.run_dir) if why else ""
        state = "offline" if why else "online" if server else "writing"
        self.report(state, why or self._place, where=self._place, fix=again, sync=again)

    def log(self, record: Record) -> None:
        step, values = step_of(record), event_scalars(record) or scalars(record)
        new = {
            name: value
            for name, value in values.items()
            if step > self._last.get(name, self._before)
        }
        if new:
            self._run.log(new, step=step)
        self._last.update(dict.fromkeys(new, step))

    def finish(self, result: Record | None) -> None:
        outcome = (result or {}).get("outcome", "supervisor lost")
        if outcome != "ok":
            level = self._trackio.AlertLevel.ERROR
            self._run.alert(outcome, (result or {}).get("cause") or None, level)
        self._run.finish()
        self.report("finished", self._place)


def _print_to_log(*words: Any) -> None:
    print(*words, file=sys.stderr)
