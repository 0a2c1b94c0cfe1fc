"""Starts the ranks of a run on its hosts, monitors them, restarts them, and shuts them down.

``write_launch_files`` writes ``hostfile``, ``ssh_config``, ``ds_env`` and ``command.txt``;
``supervise`` runs them to the end of the run, over as many attempts as it takes, and writes
``result.json``. Nothing here imports torch or deepspeed.
"""

from __future__ import annotations

from llmx.launch.render.files import check_launch, write_launch_files
from llmx.launch.supervision.supervisor import supervise

__all__ = ["check_launch", "supervise", "write_launch_files"]
