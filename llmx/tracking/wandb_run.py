"""One W&B run for one run of llmx, online where that works and offline where not.

The config is whole at ``init`` (a later ``config.update`` of a nested key would leave a
partial record). The offline file is complete whatever the server does: it is written by
wandb-core before anything is sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmx.tracking.base import RunMeta, Say, Status
from llmx.tracking.metrics import Record, Summary, scalars, step_of
from llmx.tracking.reach import why_offline

LONGEST_TEXT = 16_384
"""Characters of one text in the config (a diff can be megabytes; provenance.json has it)."""


class WandbTracker:
    """Mirrors into ``RUN_DIR/wandb`` and, where there is a way out, to the server."""

    name = "wandb"

    def __init__(self, say: Say) -> None:
        self._say = say
        self._run: Any = None
        self._summary = Summary()
        self._step_shift = 0
        self._last_step = 0
        self._online = False

    def start(
        self,
        config: dict[str, Any],
        ds_config: dict[str, Any],
        provenance: dict[str, Any],
        meta: RunMeta,
    ) -> None:
        whole = {**config, "ds_config": ds_config, "provenance": _shortened(provenance)}
        # Nobody else's service, no crash reports to a third party, no chatter.
        os.environ.pop("WANDB_SERVICE", None)
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        set_aside_earlier(meta)
        why = _why_not_online(meta)
        if not why:
            try:
                self._open("online", whole, meta)
                self._online = True
            except Exception as error:
                why = f"the server refused or gave no answer: {_first_line(error)}"
                # Frees the run id, so that the same run can be opened offline.
                wandb.teardown()
                set_aside_earlier(meta)
        if why:
            self._open("offline", whole, meta)
        self._tell(why)

    def _open(self, mode: str, config: dict[str, Any], meta: RunMeta) -> None:
        import wandb

        self._run = wandb.init(
            id=meta.run_id,
            name=meta.name or None,
            project=meta.project,
            entity=meta.entity,
            group=meta.group,
            tags=list(meta.tags) or None,
            dir=str(meta.run_dir),
            config=config,
            mode=mode,
            settings=wandb.Settings(
                # Together with the first look at the server these stay below the whole.
                init_timeout=0.25 * meta.finish_timeout_s,
                finish_timeout=0.45 * meta.finish_timeout_s,
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=1.0,  # a SIGKILL loses a second, not 15
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,  # provenance has the commit and the diff
            ),
        )

    def log(self, record: Record) -> None:
        """One row a step: ``_step`` is the optimizer step, and only ever grows.

        A restart that goes back some steps continues further right (W&B drops rows of a
        smaller step); ``train/step`` always has the true one.
        """
        self._summary.add(record)
        values = scalars(record)
        if not values:
            return
        step = step_of(record)
        if step + self._step_shift < self._last_step:
            self._step_shift = self._last_step + 1 - step
        self._last_step = step + self._step_shift
        values[f"{record['kind']}/step"] = step
        if record.get("time"):
            values["_timestamp"] = record["time"]
        self._run.log(values, step=self._last_step)

    def finish(self, result: Record | None) -> None:
        self._run.summary.update(self._summary.values(result))
        outcome = (result or {}).get("outcome", "supervisor lost")
        try:
            self._run.finish(exit_code=0 if outcome == "ok" else 1)
        except TimeoutError:
            self._online = False
            self._tell("the server did not take everything before the time was up")
            return
        if self._online:
            self._say(Status(self.name, "finished", str(self._run.url), where=str(self._run.url)))

    def _tell(self, why: str) -> None:
        if not why:
            url = str(self._run.url)
            self._say(Status(self.name, "online", url, where=url))
            return
        directory = Path(self._run.dir).parent
        self._say(
            Status(
                self.name,
                "offline",
                why,
                fix=f"wandb sync {directory}",
                where=str(directory),
                sync=f"wandb sync {directory}",
            )
        )


def set_aside_earlier(meta: RunMeta) -> None:
    """Move what an earlier or failed mirror of this run left out of the way of ``wandb sync``.

    Two directories of one run id would be uploaded as one run, the partial over the whole.
    """
    directory = meta.run_dir / "wandb"
    for earlier in directory.glob(f"*run-*-{meta.run_id}"):
        if earlier.is_symlink():
            continue
        aside = directory / "superseded"
        aside.mkdir(exist_ok=True)
        count = sum(1 for _ in aside.glob(f"{earlier.name}*"))
        earlier.rename(aside / (f"{earlier.name}.{count}" if count else earlier.name))


def _why_not_online(meta: RunMeta) -> str:
    import wandb

    if meta.mode == "offline":
        return "tracking.mode=offline"
    if meta.mode == "auto" and os.environ.get("WANDB_MODE", "online") not in ("online", "run"):
        return f"WANDB_MODE={os.environ['WANDB_MODE']} is set in the environment"
    base_url = wandb.setup().settings.base_url
    return why_offline(base_url, timeout_s=min(3.0, 0.15 * meta.finish_timeout_s))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + f"\n... {len(value)} characters, whole in provenance.json"
    return value
