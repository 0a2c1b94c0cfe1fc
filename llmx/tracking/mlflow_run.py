"""One run of MLflow (its tag ``llmx.run_id``) for one run of llmx and all its restarts.

MLflow forgets no point: what it has is kept, and repeated steps are passed over.
"""

from __future__ import annotations

import os
import time
from typing import Any

from llmx.run.metrics.lines import Record, event_scalars, scalars, step_of
from llmx.tracking.base import RunMeta, Tracker, flat, replay_command, why_not_online

STATUS = {"ok": "FINISHED", "interrupted": "KILLED", "pruned": "KILLED"}


class MlflowTracker(Tracker):
    """Writes to tracking.uri, MLFLOW_TRACKING_URI or RUN_DIR/mlflow."""

    name = "mlflow"
    needs = ("mlflow", "sqlalchemy", "alembic")
    reads = ("uri",)

    def start(self, meta: RunMeta) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # no chatter to a third party
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a directory is a store too
        from mlflow.tracking import MlflowClient

        here = meta.run_dir / "mlflow"
        here.mkdir(exist_ok=True)
        uri = configured = meta.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        why = why_not_online(configured, meta) if configured.startswith("http") else ""
        if why or not configured:
            uri = f"sqlite:///{here}/mlflow.db"
        self._meta, self._last, online = meta, dict[str, int](), uri.startswith("http")
        self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._open(meta, artifacts=None if online else f"{here}/artifacts")
        self._place = uri if online else f"mlflow ui --backend-store-uri {uri}"
        self._away = replay_command(meta.run_dir) if why else ""
        state = "offline" if why else "online" if online else "writing"
        self.report(state, why or self._place, where=self._place, fix=self._away, sync=self._away)

    def _open(self, meta: RunMeta, artifacts: str | None) -> None:
        client, project = self._client, meta.settings.project
        experiment = client.get_experiment_by_name(project)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(project, artifacts)
        )
        query = f"tags.`llmx.run_id` = '{meta.run_id}'"
        if runs := client.search_runs([number], query, max_results=1):
            self._id = runs[0].info.run_id
            self._last = {metric.key: metric.step for metric in runs[0].to_proto().data.metrics}
            client.update_run(self._id, status="RUNNING")
            return
        tags = {"llmx.run_id": meta.run_id, "llmx.group": meta.settings.group or ""}
        tags |= flat(dict.fromkeys(meta.settings.tags, "true"))
        self._id = client.create_run(number, run_name=meta.name, tags=tags).info.run_id
        self._send("Param", flat({**meta.config, "ds_config": meta.ds_config}))

    def _send(self, kind: str, values: dict[str, Any], *when: int) -> None:
        from mlflow import entities

        items = [getattr(entities, kind)(name, value, *when) for name, value in values.items()]
        for start in range(0, len(items), 100):  # the most parameters that a server takes
            part = {f"{kind.removeprefix('Run').lower()}s": items[start : start + 100]}
            self._client.log_batch(self._id, **part)

    def log(self, record: Record) -> None:
        step, values = step_of(record), event_scalars(record) or scalars(record)
        metrics = {name.replace("@", "_"): value for name, value in values.items()}
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        self._send("Metric", new, int(1000 * (record.get("time") or time.time())), step)
        self._last.update(dict.fromkeys(new, step))

    def finish(self, result: Record | None) -> None:
        self._send("RunTag", flat(self.summary(self._meta, result), "summary."))
        outcome = (result or {}).get("outcome", "supervisor lost")
        self._client.set_terminated(self._id, STATUS.get(outcome, "FAILED"))
        if not self._away:
            self.report("finished", self._place)
