"""Composes words and YAML files to an experiment that is complete and checked, with its plan.

``overrides`` and ``user_files`` check the user's words and files before Hydra composes them.
``hydra_config`` gives Hydra every key of the schema, and explains its errors in our terms.
``effects`` refuses words without effect. ``complete`` completes the experiment, checks its rules
and plans it. ``apply_overrides`` composes overrides over a snapshot (``resume``, ``reproduce``).
"""
