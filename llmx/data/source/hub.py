"""Datasets of the Hugging Face Hub, streamed: ``data.path=owner/name`` (or ``hub:name``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import Any

from llmx.config.build import shown
from llmx.data.source.records import Record, Where, first_line
from llmx.errors import ConfigError, DataError

_ID = re.compile(r"[\w.-]+/[\w.-]+")
PREFIX = "hub:"


def hub_id(path: str) -> str | None:
    """The id of a dataset on the Hub, or None for a path of this machine. What exists here is
    never taken for an id; ``hub:`` in front always is one."""
    if path.startswith(PREFIX):
        return path[len(PREFIX) :]
    if _ID.fullmatch(path) and not Path(path).exists() and not Path(path).parent.is_dir():
        return path
    return None


def check_exists(option: str, path: str) -> None:
    """ConfigError where a source that ``option`` names is neither here nor may be on the Hub."""
    if not (Path(path).expanduser().exists() or has_magic(path) or hub_id(path)):
        raise ConfigError(f"{option}{shown(path)}: no such file or directory in {Path.cwd()}.")


def revision_of(name: str) -> str:
    """The commit that a dataset is at, which names its bytes."""
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, timeout=30).sha)
    except Exception as error:  # the client's errors have no common base
        raise unreachable(name, error) from error


def hub_rows(
    name: str, *, subset: str | None, split: str | None, revision: str | None = None
) -> Iterator[Record]:
    """The records of one split, streamed by ``datasets``: nothing is downloaded whole.

    ``name`` may also be a directory laid out as on the Hub. Raises DataError with what to do
    when it cannot be reached, or when it has no such subset or split.
    """
    from datasets import load_dataset

    try:
        rows: Any = load_dataset(
            name, subset, split=split or "train", streaming=True, revision=revision
        )
        for number, value in enumerate(rows, start=1):
            yield Record(dict(value), Where(Path(name), number, "row"), padded=True)
    except DataError:
        raise
    except ValueError as error:  # no such subset or split: the message lists them
        raise DataError(
            f"{PREFIX}{name}: {first_line(error)} Set data.subset and data.split."
        ) from error
    except Exception as error:
        raise unreachable(name, error) from error


def unreachable(name: str, error: Exception) -> DataError:
    return DataError(
        f"data.path={name}: neither a file, directory or glob here nor a dataset that the Hugging "
        f"Face Hub gives: {first_line(error)} Check the spelling, the network and, for a gated "
        f"one, `hf auth login`; without network, download it elsewhere (`hf download {name} "
        "--repo-type dataset --local-dir DIR`) and set data.path=DIR."
    )
