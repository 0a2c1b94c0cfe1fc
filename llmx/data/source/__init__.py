"""From files and Hub datasets to records, each with its place; which records a split has.

``files`` reads what its suffix says (``lines``, ``json_array``, ``tables``, ``compressed``),
``hub`` streams a dataset of the Hub; both give the records of ``records``. A ``source`` is one
place that is read, in its dataset format; a ``split`` has all of them, without records that are
held out, repeated or not wanted. ``digests`` name the bytes, ``rejected`` keeps what is wrong.
"""
