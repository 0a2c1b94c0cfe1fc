"""A task that fails as it is told, in its second step: ``task.kind=faulty:Faulty`` where the file
was put beside the run, ``task.options.fault=crash``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from llmx.models.model import Batch, Models
from llmx.tasks import Loss
from llmx.tasks.sft import Options as SftOptions
from llmx.tasks.sft import Sft

HEALED = Path(__file__).with_name("healed")
"""With this file nothing crashes any more."""


@dataclass
class Options(SftOptions):
    """Of ``task.options``."""

    fault: str = ""
    """``crash`` or ``hang``."""


class Faulty(Sft):
    """Instructions, until the second step."""

    Options = Options
    calls = 0

    def loss(self, models: Models, batch: Batch) -> Loss:
        self.calls += 1
        if self.calls > self.exp.batch.global_batch // self.exp.batch.micro_batch:
            if self.options.fault == "hang":
                time.sleep(3600)
            if self.options.fault == "crash" and not HEALED.exists():
                raise RuntimeError("the wheel came off")
        return super().loss(models, batch)
