"""All weights on every rank for a while, under ZeRO-3: for generation, which reads them for each
token. Proved by ``python -m pytest -m deepspeed tests/integration/test_train_engines.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llmx.train.engine import Engine


@contextlib.contextmanager
def whole_weights(engine: Engine) -> Iterator[None]:
    """Inside, every rank holds the whole model, gathered once. Collective; without ZeRO-3 nothing
    happens.

        with whole_weights(engine):
            completions = generate(engine, prompts, sampling, seeds=seeds)

    It takes the memory of all weights on every device (2 bytes a parameter in bf16), and saves a
    gathering of every layer for each token. Weights must not be changed inside. An error inside
    is the end of the engine: DeepSpeed puts its hooks back only where the block ends well.
    """
    if engine.stage != 3:
        yield
        return
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    with unwrap_model_for_generation(engine.engine):
        yield
