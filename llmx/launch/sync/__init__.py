"""``launch.sync=rsync``: copies for hosts without a shared file system.

``files.py`` copies what ranks read and write, ``checkpoints.py`` copies checkpoints while a run
continues.
"""
