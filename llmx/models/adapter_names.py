"""Names of an adapter in a network and in the files of ``peft``. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "default"
"""The name that peft gives an adapter by default."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
QUANTIZATION_FILE = "base_quantization.json"
"""The values of ``BitsAndBytesConfig``, if the base was kept in 4 bits."""

PREFIX = "base_model.model."
"""The prefix of names in ``adapter_model.safetensors``."""
MATRIX_A, MATRIX_B = ".lora_A.weight", ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
"""Ends of names there, behind that of the adapted layer."""


def is_added(name: str) -> bool:
    """Whether this parameter of a network is one of the adapter's own."""
    return ".lora_" in name


def exported_name(name: str) -> str:
    """A trained parameter's name in ``adapter_model.safetensors``."""
    plain = name.replace(f"{MAGNITUDE}.{NAME}.weight", MAGNITUDE)
    return PREFIX + plain.replace(f".{NAME}.", ".") if is_added(name) else PREFIX + name


def read_quantization(directory: Path) -> dict[str, Any] | None:
    """The quantization of the base of the adapter in ``directory``; None if it has none."""
    path = directory / QUANTIZATION_FILE
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def holds_adapter(directory: Path) -> bool:
    """Whether a directory is one of peft: an adapter, not a model."""
    return (directory / CONFIG_FILE).is_file()
