"""The weights of a Hugging Face directory: safetensors files of bounded size, and their index.

Every export goes through here, from a checkpoint and from the engine alike. The bytes are those
that ``safetensors`` would write. Standard library only. Tried by
``python -m pytest tests/unit/test_checkpoint_export.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from llmx.checkpoint.disk import DISK, Disk, write_file
from llmx.checkpoint.tensors import Fragment, write_tensors

SHARD_BYTES = 2 * 2**30


class ShardWriter:
    """Collects tensors and writes a file whenever the next one would not fit.

    ``finish`` gives the files their names, which have their number in them. All methods raise
    OSError where the disk is full or broken.
    """

    def __init__(
        self, directory: Path, *, shard_bytes: int = SHARD_BYTES, disk: Disk = DISK
    ) -> None:
        """``directory`` exists."""
        self._directory, self._limit, self._disk = directory, shard_bytes, disk
        self._open: list[Fragment] = []
        self._open_bytes = self._total_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []

    def add(self, tensor: Fragment) -> None:
        """The next tensor. Its buffer is read when its file is written, by ``finish`` at the
        latest: keep it until then."""
        size = tensor.spec.num_bytes
        if self._open and self._open_bytes + size > self._limit:
            self._write()
        self._open.append(tensor)
        self._open_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        """Write the rest, and the index if there are several files."""
        self._write()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            file = "model.safetensors"
            if count > 1:
                file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._disk.rename(path, self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2) + "\n"
            write_file(self._disk, self._directory / "model.safetensors.index.json", text.encode())

    def _write(self) -> None:
        path = self._directory / f"part-{len(self._files)}.safetensors"
        tensors = sorted(self._open, key=lambda each: each.key)
        write_tensors(path, tensors, metadata={"format": "pt"}, disk=self._disk)
        self._files.append((path, [each.key for each in self._open]))
        self._open, self._open_bytes = [], 0
