"""One experiment of SwanLab for one run of llmx and all its restarts, which repeat steps: SwanLab
takes no step of a metric twice, and keeps the first."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

from llmx.run.metrics.lines import Record, event_scalars, scalars, step_of
from llmx.tracking.base import RunMeta, Tracker, why_not_online

STATES = {"ok": "success", "interrupted": "aborted", "pruned": "aborted"}
PROBES = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")


class SwanlabTracker(Tracker):
    """Writes into RUN_DIR/swanlab or, where there is a key and a way out, to the server."""

    name = "swanlab"
    needs = ("swanlab",)
    reads = ("entity",)

    def start(self, meta: RunMeta) -> None:
        import swanlab

        self._meta = meta
        self._project = re.sub(r"[^\w\-+.]", "-", meta.settings.project, flags=re.ASCII)[:100]
        settings = swanlab.Settings()
        why = "" if settings.api_key else f"no API key for {settings.api_host}; run `swanlab login`"
        if meta.settings.mode == "auto" and settings.mode != "online":
            why = f"SWANLAB_MODE={settings.mode} is set in the environment"
        if not (why := why or why_not_online(settings.api_host, meta)):
            try:
                self._open("online", meta)
                self.report("online", str(self._run.url))
                return
            except Exception as error:
                why = f"the server refused: {(str(error) or repr(error)).splitlines()[0]}"
        for earlier in (meta.run_dir / "swanlab").glob("run-*"):
            earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
        self._open("offline", meta)
        upload = f"swanlab sync --project {self._project} --id {meta.run_id} {self._run.dir}"
        self.report("offline", why, where=str(self._run.dir), fix=upload, sync=upload)

    def _open(self, mode: Any, meta: RunMeta) -> None:
        import swanlab

        with contextlib.suppress(KeyError, AttributeError):  # the console is the supervisor's
            sys.modules["swanlab.sdk.internal.pkg.console"].c.quiet = True
        # Of this machine the server shall know what the config says, and no more.
        quiet = {"probe": dict.fromkeys(PROBES, False), "terminal": {"proxy_type": "none"}}
        self._run: Any = swanlab.init(
            mode=mode,
            id=meta.run_id,
            resume="allow",
            project=self._project,
            workspace=meta.settings.entity,
            name=meta.name or None,
            tags=list(meta.settings.tags),
            group=meta.settings.group,
            log_dir=str(meta.run_dir / "swanlab"),
            config={**meta.config, "ds_config": meta.ds_config},
            settings=swanlab.Settings.model_validate({**quiet, "interactive": False}),
        )

    def log(self, record: Record) -> None:
        if values := event_scalars(record) or scalars(record):
            self._run.log(values, step=step_of(record))

    def finish(self, result: Record | None) -> None:
        summary = self.summary(self._meta, result)
        self._run.config.update({f"summary.{name}": value for name, value in summary.items()})
        state = STATES.get((result or {}).get("outcome", ""), "crashed")
        self._run.finish(state=state, error=None if state == "success" else summary.get("cause"))
        if self._run.mode == "online":
            self.report("finished", str(self._run.url))
