"""From words and YAML files to an experiment that is complete and checked, with its plan.

``overrides`` and ``user_files`` check what the user typed and wrote before Hydra composes it;
``explain`` puts what Hydra refuses all the same into words of the config; ``defaults`` gives Hydra
every key of the schema. ``complete`` is the one road from composed values to ``Composed``: types,
hardware, local paths, rules, plan. ``apply_overrides`` composes overrides over a snapshot, for
``resume`` and ``reproduce``.
"""
