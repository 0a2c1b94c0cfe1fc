"""What users get from llmx, recorded bit for bit: a tool to run before and after a redesign.

    python -m tests.behaviour record            # tests/golden/behaviour.json, on purpose
    python -m tests.behaviour compare           # run all of it again; exit code 1 on a difference
    python -m tests.behaviour compare --only sft data/labelled

``cases.py`` says what is run, ``material.py`` on which files. ``runs.py`` starts it through
``python -m llmx`` and reads the run directory; ``samples.py`` is the only file that knows how
prepared data is read. ``recording.py`` is the file, ``differences.py`` compares two of them.

Code that is redesigned is followed in ``cases.py`` (option names) and in the readers, never in the
recorded values. Floating-point sums depend on the versions of the packages and on the CPU, so the
recording says where it was made, and ``compare`` says where it runs now.
"""
