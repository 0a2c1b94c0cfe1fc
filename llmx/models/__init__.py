"""Networks: built, loaded, told about packed rows, and what a loss computes with them.

``factory`` builds a network from a config, ``initialise`` and ``load`` fill it. ``attention`` is
what its forward gets, ``select_attention`` and ``isolation`` find out how it must be told which
tokens belong together. ``adapter`` puts small matrices beside frozen weights. ``loss`` and
``experts`` are what training computes from it; ``generate`` completes prompts, as ``sampling``
says. ``conversion`` knows the names that files of the Hub have. Nothing here knows a task, a step
or a checkpoint.
"""
