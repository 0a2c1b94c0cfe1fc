"""Looking at runs: everything here reads run directories, and no run needs what it writes.

``status`` and ``watch`` show what runs are doing, here or over ssh; ``report`` makes tables and the
loss curve of a run, and the table of a sweep; ``page`` is what ``ui`` serves live and ``report``
saves; ``compare`` says what differs between two runs.
"""
