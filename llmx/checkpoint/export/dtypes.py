"""From one floating-point width to another, bit for bit as torch rounds it. numpy only."""

from __future__ import annotations

import numpy as np

NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""safetensors' name by ours."""
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""As a Hugging Face config calls them."""

NUMPY = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8",
    "F32": "<f4", "I32": "<i4", "U32": "<u4",
    "F16": "<f2", "I16": "<i2", "U16": "<u2",
    "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""numpy's; what numpy does not know (BF16, F8) is read as unsigned integers of that width."""


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """1-D values of dtype ``source`` as ``target`` (safetensors' names; BF16 as uint16).

    Rounds to nearest, ties to even. What is not floating point stays as it is.
    """
    if source == target or source not in TORCH_NAMES:
        return values
    wide = _to_float32(values, source)
    if target == "F32":
        return wide
    if target == "F16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16)
    return _to_bfloat16(wide)


def converted(source: str, target: str) -> str:
    """The dtype that ``convert`` gives."""
    return target if source in TORCH_NAMES else source


def num_infinite(values: np.ndarray, dtype: str) -> int:
    """How many of ``convert``'s result are infinite or NaN: too large for the dtype."""
    if dtype == "BF16":
        return int(np.count_nonzero((values & 0x7F80) == 0x7F80))
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def _to_float32(values: np.ndarray, source: str) -> np.ndarray:
    if source == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: np.ndarray = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(
        np.uint16
    )
    rounded[np.isnan(values)] = 0x7FC0
    return rounded
