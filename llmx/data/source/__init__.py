"""Reads files and Hub datasets as records, each with its place.

``files`` reads a file by what its suffix says (``lines``, ``tables``), ``hub``
streams a dataset of the Hub; both give the records of ``records``, which also has what all rows
have in common (``Row``) and what becomes of rejected ones.
"""
