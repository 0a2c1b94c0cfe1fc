"""The trial before a launch: ``python -m llmx.models.trial CONFIG.yaml ANSWER.json cpu|cuda``.

On a CPU, whatever the run will have: kernels that exist on CUDA only are stood in for by one that
is told the same, and are tried by the ranks. Needs no weights; ``llmx.packing`` starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llmx.config import Experiment, experiment_from_dict
from llmx.models.choose_way import IMPLEMENTATIONS, PLAIN, padded_candidates
from llmx.models.factory import plain_config
from llmx.models.isolation import Answer, find_ways
from llmx.models.varlen import SEGMENTS
from llmx.rundir import write_json


def try_model(exp: Experiment, *, accelerator: str) -> dict[str, Any]:
    """``packs``: rows can be packed; ``why`` not; ``problem``: it cannot be trained at all."""
    config, seq_len = plain_config(exp), exp.data.seq_len
    found, why = Answer(None, None), ""
    if exp.data.layout != "padded":
        packing = stand_ins(exp.model.attention, accelerator)
        found = find_ways(config, implementations=packing, layouts=["packed"], seq_len=seq_len)
        why = found.why_not_packed
    if not (found.packed or found.unknown or found.why_not_trained):
        found = find_ways(
            config,
            implementations=padded_candidates(exp),
            layouts=["padded"],
            seq_len=seq_len,
        )
    return {
        "packs": found.packed is not None,
        "why": why,
        "problem": found.why_not_trained,
        "unknown": found.unknown,
    }


def stand_ins(attention: str, accelerator: str) -> tuple[str, ...]:
    """What is tried on a CPU for the attention that the run asks for."""
    if attention in PLAIN:
        return (attention,)
    if accelerator == "cuda":
        return (SEGMENTS, *PLAIN)
    return (IMPLEMENTATIONS[attention],) if attention in IMPLEMENTATIONS else PLAIN


def main(words: list[str]) -> int:
    import yaml

    config, answer, accelerator = words
    values = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    write_json(Path(answer), try_model(experiment_from_dict(values), accelerator=accelerator))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
