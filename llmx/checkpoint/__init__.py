"""Checkpoints: how they are written, committed, chosen, verified and removed.

Owns the files under ``RUN_DIR/checkpoints`` (docs/contracts.md, "Checkpoints"). Standard library
and numpy only, so every other room may import it. ``disk`` holds all writing system calls,
``tensors`` the file format, ``fragments`` which elements lie where, ``commit`` the protocol,
``storage`` who acts for a file system, ``choose`` what may be used, ``keep`` what stays.
"""
