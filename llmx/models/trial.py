"""The trial before a launch: ``python -m llmx.models.trial CONFIG.yaml RESULT.json cpu|cuda``.

On a CPU, whatever the run will have: kernels that exist on CUDA only are replaced by one that
gets the same arguments, and are tried by the ranks. Needs no weights; ``llmx.lifecycle.packing``
starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.models.factory import plain_config
from llmx.models.select_attention import PLAIN, try_layouts
from llmx.models.varlen import IMPLEMENTATIONS, SEGMENTS
from llmx.run.rundir import write_json


def try_model(exp: Experiment, *, accelerator: str) -> dict[str, Any]:
    """``packs``: rows can be packed; ``why`` not; ``dense``: only a dense mask isolates them;
    ``problem``: it cannot be trained at all."""
    packing = cpu_substitutes(exp.model.attention, accelerator)
    found = try_layouts(
        exp, plain_config(exp.model), packing=packing if exp.data.layout != "padded" else ()
    )
    return {
        "packs": found.packed is not None,
        "dense": found.packed is not None and found.packed.implementation in PLAIN,
        "why": found.why_not_packed,
        "problem": found.why_not_trained,
        "unknown": found.unknown,
    }


def cpu_substitutes(attention: str, accelerator: str) -> tuple[str, ...]:
    """What is tried on a CPU for the attention that the run asks for."""
    if attention in PLAIN:
        return (attention,)
    if accelerator == "cuda":
        return (SEGMENTS, *PLAIN)
    return (IMPLEMENTATIONS[attention],) if attention in IMPLEMENTATIONS else PLAIN


def main(words: list[str]) -> int:
    import yaml

    config, result, accelerator = words
    values = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    write_json(Path(result), try_model(experiment_from_dict(values), accelerator=accelerator))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
