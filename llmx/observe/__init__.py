"""Looking at runs: everything here reads run directories, and no run needs what it writes.

``status`` and ``watch`` show what runs are doing, here or over ssh; ``report`` makes tables, the
loss curve and HTML of a run, and the table of a sweep; ``compare`` says what differs between two
runs.
"""
