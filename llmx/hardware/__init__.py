"""This machine and the hosts of a run: what they have, and whether they fit together.

``detect`` finds the devices of this machine, ``resolve`` writes out the hosts that a config means.
``survey`` is one file of the standard library: the Python of the ranks runs it on each host, which
``remote`` sends it to. ``compare`` compares the surveys before a launch: versions, builds, GPUs,
kernels, disk, clocks. A launch over several hosts keeps them as ``hosts.json``:
host name -> its survey.
"""
