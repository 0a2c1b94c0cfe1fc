"""Start, resume and reproduce a run: everything is checked before a file is touched.

A start (``start.run_composed``; ``start.prepare`` for each trial of a sweep):

1. ``compose.complete`` completes the typed config, checks its rules, and plans.
2. ``launch.check_launch`` refuses a secret in ``launch.env`` or ``hardware.env``, say, before
   anything is written.
3. ``preflight.check_inputs`` looks at the files of the models and at the first rows of each source,
   as the task takes them. ``knowledge.informed`` then plans with all that is known (traces of the
   micro step, finished runs), and chooses what the config leaves to the plan (``auto``) by it.
4. ``run.snapshot.write`` writes the snapshot and checks its round trip.
5. ``launch.write_launch_files`` writes hostfile, ssh_config, ds_env and command.txt.
   ``dry_run=true`` ends here.
6. ``launch.supervise`` starts the ranks, monitors and restarts them, and writes ``result.json``.

``resume`` and ``reproduce`` begin with an old snapshot in the place of step 1, and say first what
differs from then.
"""
