"""The command line: ``python -m llmx [command] [overrides]``, and ``llmx``, which is the same.

``main`` finds the command in the table of ``commands``. Light ones run in this process; those that
load heavy libraries in one of their own (``python -m MODULE``). ``hydra_app`` composes the config
of a command that takes one, and starts the run. ``help``, its topics and ``completion`` are made
from the same table, the schema and the files of ``conf/``.
"""
