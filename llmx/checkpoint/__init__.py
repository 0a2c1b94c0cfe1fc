"""Checkpoints: how they are written, committed, selected, verified and pruned.

Owns the files under ``RUN_DIR/checkpoints`` (docs/development/contracts.md, "Checkpoints").

These modules need the standard library and numpy only, so every other package may import them:
``disk`` holds all writing system calls, ``tensors`` the file format, ``fragments`` which elements
are in which file, ``manifest`` the list of files, ``commit`` the protocol, ``selection`` what is
usable, ``retention`` what stays, ``pointers`` the files ``latest`` and ``best``, ``model_files``
the files of a model directory.

The others need torch, and only the ranks and the exports import them: ``state`` (in and out of the
engine), ``save`` (the background writer), ``distributed`` (several hosts) and ``export``.
"""
