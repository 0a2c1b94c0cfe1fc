"""The sample store: building it, opening it, what became of the records.

``spec`` names what is to be prepared, ``build`` prepares it: ``writer`` appends examples,
``packing`` puts them into samples. ``samples`` opens the store, ``precomputed`` adds columns to it,
``summary`` shows it.
"""
