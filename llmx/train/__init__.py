"""A rank's side: the engine, the visible loop, evaluation, export. Started by ``llmx.worker``."""
