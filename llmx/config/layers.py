"""``optim.layer_decay``: the learning rate of each layer, as a part of ``optim.lr``. Pure."""

from __future__ import annotations

EMBEDDINGS, HEAD = "embeddings", "head"
"""What is below the first layer, and what is above the last one."""


def layer_number(parameter: str) -> int | None:
    """The number of the layer that a parameter is in, from its dotted name."""
    return next((int(part) for part in parameter.split(".") if part.isdecimal()), None)


def layer_factor(decay: float, place: int | str, *, num_layers: int) -> float:
    """``decay`` to the power of how many layers ``place`` is below the head: as in BEiT's and
    ELECTRA's fine-tuning, 1 for the head, ``decay`` for the last layer, and so on down."""
    if place == HEAD:
        return 1.0
    number = -1 if place == EMBEDDINGS else int(place)
    return float(decay ** (num_layers - number))
