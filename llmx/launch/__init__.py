"""Starts the ranks of a run on its hosts, monitors them, restarts them, and shuts them down.

``write_launch_files`` writes ``hostfile``, ``ssh_config``, ``ds_env`` (0600: the environment of the
ranks) and ``command.txt``, which can be pasted into a shell. ``supervise`` runs them to the end of
the run, over as many attempts as it takes, and writes ``result.json``. It starts
``python -m llmx.tracking.process RUN_DIR`` for the trackers, and the command ``report`` at the end.
Nothing here imports torch or deepspeed.

``result.json``, by the supervisor, always, last:

    {"run_id": "...", "outcome": "ok", "cause": "", "fix": "", "other_fix": "",
     "failure": "", "signal": "", "failed_rank": null, "host": null, "log": null, "traceback": "",
     "started": 0.0, "ended": 0.0,
     "steps": 600, "final_loss": 0.1, "exact_match": 0.97, "tokens_per_s": 4e4,
     "model": "/abs/run/model", "exit_code": 0, "launched": true, "attempts": 1, "restarts": 0,
     "warnings": []}

``outcome``: ``ok``, ``oom``, ``nan``, ``comm``, ``hang``, ``host_lost``, ``disk_full``,
``config``, ``data``, ``interrupted``, ``crash``. Success only if every rank's status file, fresh
for this token, says ``finished``. The task's metrics (``exact_match``), as the last evaluation
measured them, are flat keys. ``failure`` is the name of a known one (``llmx.failures``);
``log`` is that of the failed rank; ``attempts`` and ``restarts`` count over the whole life of the
run directory. ``other_fix``: of an interrupted run, ``fix`` without the command that resumes it.

``attempts.jsonl``, a line at the end of each attempt (on a full disk as soon as there is space):

    {"attempt": 1, "started": t, "ended": t, "outcome": "crash", "cause": "...", "first_step": 0,
     "last_step": 57, "decision": "restart|stop|finished", "why": "...", "wait_s": 10,
     "hosts": ["node-a", "node-b"], "rank": 1, "host": "node-b", "saved_step": 50}

and ``skip_steps`` once there are any. ``first_step`` and ``last_step`` are null where training did
not begin; ``rank``, ``host`` and ``saved_step`` where there is none. ``last_step`` is that of the
statuses: a rank that is killed may have been up to 5 s further.

``supervisor.json``, replaced at each change and every few seconds, for ``status``:
``{"state": "preparing|running|waiting|ending|finished", "attempt": 2, "pid": 1, "host": "...",
"time": t, "until": t, "why": "..."}``; ``until`` may be null; ``why`` of ``running`` says that a
step is overdue. ``supervisor.lock`` (flock; JSON with host, pid, time) is held while a supervisor
lives: a second one refuses.

Shutdown of an attempt: on a request of the user every agent sends SIGUSR1 to the ranks of its host,
which have ``launch.stop_grace_s`` to save and exit; after a failure SIGINT, and 3 s. Processes that
are left are killed. A second request of the user kills them at once. An agent whose supervisor
exited or does not respond sends SIGUSR1 and waits 15 s. The next attempt first kills agents of
earlier attempts, and then processes with the run's token, on every host.

With ``launch.sync=rsync`` the supervisor pulls committed checkpoints to its own run directory in
the background, so that a host that never comes back costs one save interval.
"""

from __future__ import annotations

from llmx.launch.files import check_launch, rank_environment, write_launch_files
from llmx.launch.supervision.finalize import start_report
from llmx.launch.supervision.supervisor import supervise

__all__ = ["check_launch", "rank_environment", "start_report", "supervise", "write_launch_files"]
