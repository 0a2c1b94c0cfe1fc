"""Sweeps: which trials of a multirun are run, what became of them, and which is best.

- ``sweep.py``: the engine, which runs the trials of every sweeper;
- ``prune.py``: trials that need not run, and why;
- ``halving.py``: which trials continue (``sweep.halving``);
- ``slots.py``, ``process.py``, ``slurm.py``: where a trial runs;
- ``tune.py``, ``tuned.py``: the search of ``tune``, and what it prints;
- ``best.py``: the words of the best trial, a file to start from.

``llmx.run.sweepdir`` has the trials and their file, ``sweep.json``.
"""
