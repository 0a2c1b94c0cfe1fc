"""The trial before a launch, on a CPU, whatever the run will have: kernels that exist on CUDA only
are replaced by one that gets the same arguments, and are tried by the ranks. Needs no weights.
``llmx.tasks.trial`` calls it, in a process of its own.
"""

from __future__ import annotations

from typing import Any

from llmx.config import DataConfig, ModelConfig
from llmx.models.factory import plain_config
from llmx.models.model import CAUSAL_LM
from llmx.models.select_attention import PLAIN, suitable, try_layouts
from llmx.models.varlen import IMPLEMENTATIONS, SEGMENTS


def try_model(
    model: ModelConfig, data: DataConfig, *, accelerator: str, head: str = CAUSAL_LM
) -> dict[str, Any]:
    """``packs``: rows can be packed; ``why`` not; ``dense``: only a dense mask isolates them;
    ``problem``: it cannot be trained at all, and what to do."""
    packing = cpu_substitutes(model.attention, accelerator)
    found = try_layouts(
        model,
        data,
        plain_config(model),
        packing=packing if data.layout != "padded" else (),
        head=head,
    )
    problem = found.why_not_trained
    return {
        "packs": found.packed is not None,
        "dense": found.packed is not None and found.packed.implementation in PLAIN,
        "why": found.why_not_packed,
        "problem": problem and f"{problem}. Choose {suitable(head)}.",
        "unknown": found.unknown,
    }


def cpu_substitutes(attention: str, accelerator: str) -> tuple[str, ...]:
    """What is tried on a CPU for the attention that the run asks for."""
    if attention in PLAIN:
        return (attention,)
    if accelerator == "cuda":
        return (SEGMENTS, *PLAIN)
    return (IMPLEMENTATIONS[attention],) if attention in IMPLEMENTATIONS else PLAIN
