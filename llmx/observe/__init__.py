"""Looking at runs: everything here reads run directories, and no run needs what it writes.

``status`` and ``watch`` show what runs are doing, here or over ssh; ``report`` makes tables, the
loss curve and HTML of a run, and the table of a sweep; ``compare`` says what differs between two
runs. ``diagnose`` finds the known failure (``known_failures``) in the log of a rank, for the
supervisor and for ``python -m llmx.observe.diagnose < rank.log``.
"""
