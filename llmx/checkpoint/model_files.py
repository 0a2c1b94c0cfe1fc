"""Damaged files of a model directory, by their sizes and headers. Standard library only.

    damaged_files(Path("~/models/Qwen3-0.6B").expanduser())  # [] where all is well

Found is what an interrupted download, or a git clone without git-lfs, leaves; not a flipped bit.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from llmx.checkpoint.tensors import MAX_HEADER_BYTES
from llmx.errors import ConfigError
from llmx.text import plural, printable

LFS_POINTER = b"version https://git-lfs"
WEIGHTS = (".safetensors", ".bin")
FETCH = "Download it again, or write it anew: python -m llmx export RUN."


def check_model_files(directory: Path) -> None:
    """ConfigError with a line for each damaged file of a model or an adapter."""
    if problems := damaged_files(directory):
        raise ConfigError("\n".join(problems))


def damaged_files(directory: Path, *, weights: bool = True) -> list[str]:
    """A line for each file that is damaged or missing. ``weights``: look at those, too."""
    problems = []
    for file in sorted(directory.glob("*")):
        is_weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        if not file.is_file() or (is_weights and not weights):
            continue
        try:
            problem = _problem(file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})."
        if problem:
            problems.append(f"{printable(str(file), keep='')}: {problem}")
    return problems


def _problem(file: Path) -> str:
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            where = printable(str(file.parent), keep="")
            return (
                "is a git-lfs pointer, not the file itself. Run `git lfs pull` in "
                f"{where}, or download the model again."
            )
    if file.suffix == ".safetensors":
        return _safetensors_problem(file)
    if file.suffix == ".json":
        return _json_problem(file)
    if file.suffix == ".bin":
        return _pickle_problem(file)
    return ""


def _safetensors_problem(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            return f"is not a safetensors file ({size:,} bytes). {FETCH}"
        if size < 8 + length:
            return f"is cut off ({size:,} bytes, its header alone has {8 + length:,}). {FETCH}"
        try:
            header = json.loads(stream.read(length))
            ends = [value["data_offsets"][1] for key, value in header.items() if key[:2] != "__"]
            expected = 8 + length + max(map(int, ends), default=0)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return f"has a damaged header. {FETCH}"
    if size != expected:
        return f"is damaged or cut off ({size:,} bytes, its header says {expected:,}). {FETCH}"
    return ""


def _json_problem(file: Path) -> str:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON ({error}). {FETCH}"
    if not file.name.endswith(".index.json"):
        return ""
    try:
        shards = set(values["weight_map"].values())
        missing = sorted(name for name in shards if not (file.parent / name).is_file())
    except (LookupError, TypeError, AttributeError):
        return f"has no weight_map. {FETCH}"
    if missing:
        return (
            f"{plural(len(missing), 'file')} of the {len(shards)} that it names missing, e.g. "
            f"{missing[0]}. Download the model again."
        )
    return ""


def _pickle_problem(file: Path) -> str:
    with file.open("rb") as stream:
        head = stream.read(4)
    if not head or (head == b"PK\x03\x04" and not zipfile.is_zipfile(file)):
        return f"is damaged or cut off ({file.stat().st_size:,} bytes). {FETCH}"
    return ""
