"""Notices that the run directory was removed, or moved away, while the ranks train.

It is made again with the files that a resume reads, and the ranks save a checkpoint into it and
exit.
"""

from __future__ import annotations

import contextlib

from llmx.launch.supervision.console import RunLog
from llmx.launch.supervision.signals import ShutdownRequest
from llmx.run.rundir import RunDir

REMOVED = "the removal of the run directory"


class RunPlace:
    """Watches the directory of a run."""

    def __init__(self, run_dir: RunDir, log: RunLog, shutdown: ShutdownRequest) -> None:
        self._run_dir, self._log, self._shutdown = run_dir, log, shutdown
        self._kept: dict[str, bytes] = {}
        paths = (
            run_dir.config, run_dir.overrides, run_dir.plan, run_dir.ds_config, run_dir.identity,
            run_dir.provenance, run_dir.resume, run_dir.attempts, run_dir.signature,
        )  # fmt: skip
        for path in paths:
            with contextlib.suppress(OSError):
                self._kept[path.name] = path.read_bytes()

    def check(self) -> None:
        """Look, and do what can be done. What is written to the path makes the directory again, so
        its config is looked for."""
        try:
            self._run_dir.config.stat()
        except FileNotFoundError:
            self._restore()
        except OSError:
            pass  # a disk that does not answer is not a removed directory

    def _restore(self) -> None:
        if self._shutdown.count:
            return
        root = self._run_dir.root
        try:
            for directory in (root, self._run_dir.logs, self._run_dir.ranks):
                directory.mkdir(parents=True, exist_ok=True)
            for name, content in self._kept.items():
                (root / name).write_bytes(content)
            end = f"{root} was created again with its config, without its metrics and checkpoints."
        except OSError as error:
            end = f"{root} cannot be created again ({error.strerror})."
        self._log.warning(
            f"the run directory was removed or moved while the run trained. {end} The run ends "
            "with a checkpoint."
        )
        self._shutdown.request(REMOVED)
