"""One part in a process of its own: ``python -m llmx.bench.part JOB.json``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
from pathlib import Path

from llmx.bench.context import Context, PartFailed
from llmx.bench.measure import NotHere, Outcome
from llmx.config.schema import DeviceConfig

PARTS: dict[str, tuple[str, str, float]] = {
    # name: (module:function, title, minutes at most)
    "versions": ("kernels:versions", "Versions", 1),
    "matmul": ("kernels:matmul", "Matrix products and memory", 1),
    "attention": ("kernels:attention", "Attention kernels, forward and backward", 3),
    "demo": ("training:demo", "The demo", 4),
    "stages": ("training:stages", "ZeRO stages and offload", 5),
    "resume": ("training:resume", "Resume, bit for bit", 5),
    "mfu": ("training:mfu", "Speed and memory of pretraining at 4096 tokens", 8),
    "packed": ("training:packed", "SFT, packed and padded", 4),
    "saves": ("training:saves", "Saving in the background", 5),
    "fp16": ("training:fp16", "fp16 with a dynamic loss scale", 4),
    "synchronisations": ("training:synchronisations", "Waiting for the GPU", 3),
    "several_gpus": ("training:several_gpus", "Several GPUs", 6),
    "peers": ("peers:peers", "Packed SFT against TRL and the Hugging Face Trainer", 8),
}
"""In the order in which they run: what is quick and tells most comes first."""


def main(argv: list[str]) -> int:
    """Run the part that the job names and write its outcome beside the job."""
    path = Path(argv[0])
    job = json.loads(path.read_text(encoding="utf-8"))
    values = job["context"]
    context = Context(
        root=Path(values["root"]),
        tiny=values["tiny"],
        device=DeviceConfig(**values["device"]),
        device_name=values["device_name"],
        num_gpus=values["num_gpus"],
    )
    place, title, _ = PARTS[job["part"]]
    module, function = place.split(":")
    outcome = Outcome(job["part"], title, "done")
    try:
        run = getattr(importlib.import_module(f"llmx.bench.{module}"), function)
        outcome.measures = run(context)
    except NotHere as error:
        outcome.state, outcome.why = "not run", str(error)
    except PartFailed as error:
        outcome.state, outcome.why = "failed", str(error)
    except Exception as error:
        # Whatever it is, it is this part's alone: the others run all the same.
        traceback.print_exc()
        outcome.state = "failed"
        outcome.why = f"{type(error).__name__}: {error}".splitlines()[0]
    path.with_suffix(".outcome.json").write_text(
        json.dumps(dataclasses.asdict(outcome)), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
