"""Commands that load heavy libraries, each a process of its own: ``python -m llmx.cli.X``."""
