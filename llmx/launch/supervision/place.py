"""Notices that the run directory was moved or removed while the ranks train.

A moved one gets a link at its old path, so that the run goes on in the new place. A removed one is
made again with the files that a resume reads, and the ranks save a checkpoint into it and exit.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.run.rundir import RunDir

REMOVED = "the removal of the run directory"


class RunPlace:
    """Watches the directory of a run. ``close`` it at the end."""

    def __init__(self, run_dir: RunDir, log: RunLog, shutdown: ShutdownRequest) -> None:
        self._run_dir, self._log, self._shutdown = run_dir, log, shutdown
        self._descriptor = os.open(run_dir.root, os.O_RDONLY | os.O_DIRECTORY)
        self._kept: dict[str, bytes] = {}
        paths = (
            run_dir.config, run_dir.overrides, run_dir.plan, run_dir.ds_config, run_dir.identity,
            run_dir.provenance, run_dir.resume, run_dir.attempts, run_dir.signature,
        )  # fmt: skip
        for path in paths:
            with contextlib.suppress(OSError):
                self._kept[path.name] = path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)

    def check(self) -> None:
        """Look, and do what can be done. Often: what is written to the old path makes it again."""
        try:
            status = self._run_dir.root.stat()
            if os.path.samestat(status, os.fstat(self._descriptor)):
                if not self._run_dir.config.exists():
                    self._restore("the files of the run directory were removed")
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a disk that does not answer is not a moved directory
        self._follow()

    def _follow(self) -> None:
        """Link the old path to the directory, which it no longer leads to."""
        root = self._run_dir.root
        with contextlib.suppress(OSError):
            place = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            if os.path.samestat(place.stat(), os.fstat(self._descriptor)):
                root.parent.mkdir(parents=True, exist_ok=True)
                root.symlink_to(place)
                self._log.warning(
                    f"the run directory was moved from {root} to {place}. The run continues there: "
                    f"{root} is a link to it now. Keep the link until the run has ended."
                )
                return
        self._restore("the run directory was removed, or moved to another disk,")

    def _restore(self, event: str) -> None:
        if self._shutdown.count:
            return
        root = self._run_dir.root
        try:
            for directory in (root, self._run_dir.logs, self._run_dir.ranks):
                directory.mkdir(parents=True, exist_ok=True)
            for name, content in self._kept.items():
                (root / name).write_bytes(content)
            os.close(self._descriptor)
            self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            end = f"{root} was created again with its config; its metrics and checkpoints are lost."
        except OSError as error:
            end = f"{root} cannot be created again ({error.strerror})."
        self._log.warning(f"{event} while the run trained. {end} The run ends with a checkpoint.")
        self._shutdown.request(REMOVED)
