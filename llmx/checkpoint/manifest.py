"""The manifest of a checkpoint: the names, sizes and hashes of its files."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmx.errors import LlmxError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model"
HASH_BYTES = 32


class CheckpointError(LlmxError, RuntimeError):
    """A checkpoint cannot be used, or is not there."""

    exit_code = 5


@dataclass(frozen=True)
class FileEntry:
    """One file as it was written."""

    bytes: int
    blake2b: str
    """64 hexadecimal digits."""


@dataclass(frozen=True)
class Problem:
    """The problem of one file of a checkpoint."""

    file: str
    """Relative to the checkpoint."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint over all hosts."""

    step: int
    files: Mapping[str, FileEntry]
    """Relative path -> size and hash, of all files but the manifest itself."""
    hosts: Mapping[str, str]
    """Relative path -> the host that wrote it."""
    run_id: str
    created: float = field(default_factory=time.time)
    """Seconds since the epoch; the same on all hosts, so one rank makes the manifest for all."""
    num_rollbacks: int = 0
    """How many rollbacks to an earlier step the run had by then; ``course`` in the file."""

    def is_abandoned(self, rollbacks: Sequence[int]) -> bool:
        """Whether it is of a branch that a later rollback abandoned.

        Args:
            rollbacks: the steps of all rollbacks of the run, the first one first.
        """
        return any(self.step > step for step in rollbacks[self.num_rollbacks :])

    @property
    def digest(self) -> str:
        """Tells this manifest from every other one: its own guard."""
        return str(self.to_json()["self"])

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def entry(self, name: str) -> FileEntry:
        """Size and hash of any file of the checkpoint, the manifest itself included."""
        return digest_bytes(self.to_text().encode()) if name == MANIFEST else self.files[name]

    def to_json(self) -> dict[str, Any]:
        """The content of ``manifest.json``, with its guard."""
        value = {
            "format": FORMAT,
            "step": self.step,
            "run_id": self.run_id,
            "files": {
                name: {
                    "bytes": entry.bytes,
                    "blake2b": entry.blake2b,
                    "host": self.hosts.get(name, ""),
                }
                for name, entry in sorted(self.files.items())
            },
            "created": self.created,
            **({"course": self.num_rollbacks} if self.num_rollbacks else {}),
        }
        return {**value, "self": _guard(value)}

    def to_text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"


def parse_manifest(text: str, *, step: int | None = None) -> Manifest:
    """``manifest.json`` as it was written.

    Args:
        step: the step of the directory it lies in.

    Raises:
        CheckpointError: it is torn, was edited, or belongs to another step.
    """
    try:
        value = json.loads(text)
        guard = value.pop("self")
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"it has format {value['format']}, this llmx reads format {FORMAT}"
            )
        if guard != _guard(value):
            raise CheckpointError("it was changed after it was written: its own hash differs")
        manifest = Manifest(
            step=value["step"],
            run_id=value["run_id"],
            files={
                name: FileEntry(entry["bytes"], entry["blake2b"])
                for name, entry in value["files"].items()
            },
            hosts={name: entry["host"] for name, entry in value["files"].items()},
            created=value["created"],
            num_rollbacks=int(value.get("course", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"it is torn: {error}") from error
    if step is not None and manifest.step != step:
        raise CheckpointError(f"it belongs to step {manifest.step}")
    return manifest


def read_manifest(directory: Path) -> Manifest | Problem:
    """The manifest of a checkpoint directory (``step-00000120``), or what is wrong with it."""
    step = step_of(directory.name)
    expected = "the manifest of this checkpoint" if step is None else f"the manifest of step {step}"
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
        return parse_manifest(text, step=step)
    except FileNotFoundError:
        return Problem(MANIFEST, expected, "is missing")
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        return Problem(MANIFEST, expected, str(error))


def digest_bytes(data: bytes | memoryview) -> FileEntry:
    """Size and hash of ``data``."""
    return FileEntry(len(data), hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest())


def step_name(step: int) -> str:
    """The name of a checkpoint's directory, as ``step-00000120``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint's directory name; None for any other name."""
    digits = name.removeprefix("step-")
    if digits == name or len(digits) < 8 or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if step_name(int(digits)) == name else None


def rank_file(rank: int) -> str:
    """The name of a rank's file, as ``rank-00000.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def _guard(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()
