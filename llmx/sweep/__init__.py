"""Sweeps: which trials of a multirun are run, what became of them, and which is best.

The Hydra launcher plugin runs the trials, one after another; what is done with each is decided
here:

- ``sweep.py``: one sweep while it runs;
- ``prune.py``: trials that need not run, and why;
- ``journal.py``: ``sweep.json``, by which a sweep is shown and continued;
- ``best.py``: the best trial as an experiment of its own.
"""
