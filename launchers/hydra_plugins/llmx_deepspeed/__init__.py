"""The Hydra launcher plugin of llmx: ``hydra/launcher=deepspeed``."""
