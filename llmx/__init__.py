"""llmx: a Hydra-configured experiment framework for training LLMs with DeepSpeed.

Importing this package is free: it pulls in neither torch nor hydra, so the control
process starts in well under a second. Start with ``python -m llmx --help``.
"""

__version__ = "0.1.0"
