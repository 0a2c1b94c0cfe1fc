"""What the settings of another training tool become here (``python -m llmx import``).

``llmx.config.foreign`` has the keys; ``convert`` applies it, ``trainer`` (Transformers, TRL,
DeepSpeed-Chat), ``llama_factory``, ``axolotl`` and ``deepspeed`` (its JSON) have what a value
becomes where it is not the same value, and ``command_line`` reads a command in a shell file.
"""
