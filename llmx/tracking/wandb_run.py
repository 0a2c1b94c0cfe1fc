"""One W&B run for one run of llmx and all its restarts, online where that works, else offline.

A restart repeats some steps, and W&B takes no step twice: what it has is kept, the repeated
lines are passed over. A tracker process that starts again online continues behind the last step
that the server has; offline it writes the whole run anew.

The config is whole at ``init`` (a later ``config.update`` of a nested key would leave a
partial record). The offline file is complete whatever the server does: it is written by
wandb-core before anything is sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from llmx.run.metrics.lines import Record, event_scalars, scalars, step_of
from llmx.run.rundir import RunDir
from llmx.run.tail import newest_samples
from llmx.tracking.base import RunMeta, Tracker, replay_command, why_not_online

LONGEST_TEXT = 16_384
"""Characters of one text in the config (a diff can be megabytes; provenance.json has it)."""


class WandbTracker(Tracker):
    """Writes into ``RUN_DIR/wandb`` and, where there is a way out, to the server."""

    name = "wandb"
    reads = ("entity",)

    def start(self, meta: RunMeta) -> None:
        self._meta, self._online = meta, False
        self._at_last_step: set[str] = set()
        """Kinds of the lines that the row of the last step holds already."""
        self._sampled_step: int | None = None
        """The step of the newest generated samples that W&B has."""
        provenance = _shortened(meta.provenance)
        config = {**meta.config, "ds_config": meta.ds_config, "provenance": provenance}
        # Nobody else's service, no crash reports to a third party, no chatter.
        os.environ.pop("WANDB_SERVICE", None)
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        set_aside_earlier(meta)
        why = _why_not_online(meta)
        if not why:
            try:
                self._open("online", config, meta)
                self._online = True
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                why = f"the server refused or gave no answer: {reason}"
                # Frees the run id, so that the same run can be opened offline.
                wandb.teardown()
                set_aside_earlier(meta)
        if why:
            self._open("offline", config, meta)
        self._notify_mode(why)

    def _open(
        self, mode: Literal["online", "offline"], config: dict[str, Any], meta: RunMeta
    ) -> None:
        import wandb

        settings = meta.settings
        self._run: Any = wandb.init(
            id=meta.run_id,
            name=meta.name or None,
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=list(settings.tags) or None,
            dir=str(meta.run_dir),
            config=config,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                # Together with the first look at the server these stay below the whole.
                init_timeout=0.25 * settings.finish_timeout_s,
                finish_timeout=0.45 * settings.finish_timeout_s,
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=1.0,  # a SIGKILL loses a second, not 15
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,  # provenance has the commit and the diff
            ),
        )
        # Of a run that the server knows: the step behind the last one that it has.
        self._last_step = int(self._run.starting_step or 0)

    def log(self, record: Record) -> None:
        """One row a step: ``_step`` is the optimizer step, and only ever grows.

        What W&B has already is passed over. Events (a restart, a save) go into the row of the
        moment; their own step is ``saved/step``, ``resumed/step``.
        """
        events = event_scalars(record)
        values = events or scalars(record)
        if not values:
            return
        if not events:
            step, kind = step_of(record), str(record["kind"])
            if step < self._last_step or (step == self._last_step and kind in self._at_last_step):
                return
            if step > self._last_step:
                self._last_step = step
                self._at_last_step.clear()
            self._at_last_step.add(kind)
            values[f"{kind}/step"] = step
            values.update(self._new_samples())
        if record.get("time"):
            values["_timestamp"] = record["time"]
        self._run.log(values, step=self._last_step)

    def finish(self, result: Record | None) -> None:
        if samples := self._new_samples():
            self._run.log(samples, step=self._last_step)
        self._run.summary.update(self.summary(self._meta, result))
        outcome = (result or {}).get("outcome", "supervisor lost")
        try:
            self._run.finish(exit_code=0 if outcome in ("ok", "pruned") else 1)
        except TimeoutError:
            self._online = False
            self._notify_mode("the server did not accept everything in time")
            return
        if self._online:
            self.report("finished", str(self._run.url))

    def _new_samples(self) -> dict[str, Any]:
        """A table of the samples that the task has generated, where W&B does not have them."""
        rows = newest_samples(RunDir(self._meta.run_dir).rollouts)
        if not rows or rows[0]["step"] == self._sampled_step:
            return {}
        self._sampled_step = rows[0]["step"]
        import wandb

        rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
        table = wandb.Table(
            columns=["step", "prompt", "completion", *rewards, "advantage"],
            data=[
                [
                    *(row["step"], row["prompt"], row["completion"]),
                    *(row["rewards"].get(name) for name in rewards),
                    row["advantage"],
                ]
                for row in rows
            ],
            allow_mixed_types=True,
        )
        return {"samples": table}

    def _notify_mode(self, why: str) -> None:
        if not why:
            self.report("online", str(self._run.url))
            return
        directory = Path(self._run.dir).parent
        if self._run.resumed:
            # Uploading this directory would put the last part in the place of the whole.
            replay = replay_command(self._meta.run_dir)
            self.report("offline", why, fix=replay, where=str(directory))
            return
        upload = f"wandb sync {directory}"
        self.report("offline", why, fix=upload, where=str(directory), sync=upload)


def set_aside_earlier(meta: RunMeta) -> None:
    """Move what an earlier or failed tracker process left out of the way of ``wandb sync``.

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

    if meta.settings.mode == "auto" and os.environ.get("WANDB_MODE", "online") not in (
        "online",
        "run",
    ):
        return f"WANDB_MODE={os.environ['WANDB_MODE']} is set in the environment"
    base_url = wandb.setup().settings.base_url
    why = "" if meta.settings.mode == "offline" else _why_no_credentials(base_url)
    return why or why_not_online(base_url, meta)


def _why_no_credentials(base_url: str) -> str:
    from wandb.sdk.lib.wbauth import read_netrc_auth

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    try:
        if read_netrc_auth(host=base_url):
            return ""
    except Exception as error:
        return f"the key in the netrc file cannot be used ({error}); run `wandb login`"
    return f"no API key for {base_url}; set WANDB_API_KEY or run `wandb login`"


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + f"\n... {len(value)} characters, whole in provenance.json"
    return value
