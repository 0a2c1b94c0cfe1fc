"""Checkpoints: how they are written, committed, selected, verified and pruned.

Owns the files under ``RUN_DIR/checkpoints`` (docs/contracts.md, "Checkpoints").

The modules here need the standard library and numpy only, so every other room may import them:
``disk`` holds all writing system calls, ``tensors`` the file format, ``fragments`` which elements
are in which file, ``manifest`` the list of files, ``commit`` the protocol, ``selection`` what is
usable, ``retention`` what stays, ``pointers`` the files ``latest`` and ``best``, ``received_file``
a file from another host, ``console`` verification on a terminal; and of ``export`` the modules
``weights``, ``shards`` and ``dtypes``.

Four packages need torch, and only the ranks import them: ``state`` (in and out of the engine),
``save`` (the background writer), ``distributed`` (several hosts), ``export.model`` and
``export.converted``.
"""
