"""Reads a ``run-ID.wandb`` transaction log back: config, history rows, summary, exit.

The file is a LevelDB log (32 KiB blocks of records with a 7-byte header) behind a 7-byte
file header; every record is a ``wandb_internal_pb2.Record``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32_768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbFile:
    """``config`` (nested), ``history`` (rows in order), ``summary``, ``exit_code``, ``run``."""

    def __init__(self, path: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.run: Any = None
        for data in _records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                _merge(self.config, record.run.config.update)
            elif kind == "config":
                _merge(self.config, record.config.update)
            elif kind == "history":
                row: dict[str, Any] = {}
                _merge(row, record.history.item)
                self.history.append(row)
            elif kind == "summary":
                _merge(self.summary, record.summary.update)
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def _merge(target: dict[str, Any], items: Any) -> None:
    for item in items:
        *parents, last = list(item.nested_key) or [item.key]
        inner = target
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)


def _records(data: bytes) -> Iterator[bytes]:
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            position += left
            continue
        part = data[position + 7 : position + 7 + length]
        position += 7 + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole
