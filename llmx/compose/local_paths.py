"""The paths of a config: what is a file here, what is an id of the Hub, what is missing.

A relative path starts in the directory where the user stands, everywhere, and is made absolute
while the config is composed. What is missing is found then, all of it at once:

    python -m llmx plan data=file data.path=nowhere.jsonl model=hf model.path=./nothing
"""
# ruff: noqa: PTH110, PTH111, PTH112, PTH117, PTH119, PTH120, PTH207 - os.path takes any text;
# pathlib raises for long names and for ~nobody

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmx.compose.task_rules import model_sources
from llmx.config import DataConfig, ModelConfig, TaskConfig
from llmx.config.build import shown
from llmx.config.file_formats import KNOWN, files_in, is_saved, name_problem
from llmx.errors import did_you_mean

HUB = "hub:"
_DATASET_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MOST_FILES = 1000
"""Files of a directory or a glob whose names are looked at before a launch; ranks look at all."""


def local_paths(
    data: DataConfig, model: ModelConfig, *, all_here: bool
) -> tuple[DataConfig, ModelConfig, list[str]]:
    """Data and model with absolute paths, and one message for each path that cannot be used.

    ``all_here``: every path must exist on this machine, since all ranks run here or the files
    are brought from here. Otherwise an absolute path may exist on the other hosts only.
    """
    found = _Paths(all_here)
    data = dataclasses.replace(
        data,
        path=data.path if data.sources else found.source(data.path, "data.path"),
        eval_path=data.eval_path and found.source(data.eval_path, "data.eval_path"),
        sources=[
            dataclasses.replace(part, path=found.source(part.path, f"data.sources[{index}].path"))
            for index, part in enumerate(data.sources)
        ],
        cache_dir=data.cache_dir and absolute(data.cache_dir),
    )
    model = dataclasses.replace(
        model,
        path=model.path and found.model(model.path, "model.path"),
        tokenizer=model.tokenizer and found.model(model.tokenizer, "model.tokenizer"),
    )
    return data, model, found.problems


def model_place(path: str, where: str, *, all_here: bool) -> tuple[str, list[str]]:
    """A model that the key ``where`` names: its directory made absolute, or its id; and what is
    wrong with it."""
    found = _Paths(all_here)
    return found.model(path, where), found.problems


def absolute(path: str) -> str:
    """``~`` expanded, and absolute."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_store(uri: str | None) -> str | None:
    """``tracking.uri``, absolute where it is a directory or a file of SQLite here."""
    if not uri:
        return None
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{absolute(uri.removeprefix('sqlite:///'))}"
    return uri if ":" in uri else absolute(uri)


def is_directory(path: str) -> bool:
    """Whether an absolute path is a directory here; False also for one that cannot be."""
    return os.path.isabs(path) and os.path.isdir(path)


def missing_here(data: DataConfig, model: ModelConfig, task: TaskConfig) -> Iterator[str]:
    """One message for each path of a finished config that is not on this machine."""
    named = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "data.path": None if data.sources else data.path,
        "data.eval_path": data.eval_path,
        **{f"data.sources[{i}].path": part.path for i, part in enumerate(data.sources)},
        **{f"task.options.{name}": path for name, path in model_sources(task).items()},
    }
    for where, path in named.items():
        if path and os.path.isabs(path) and not glob.has_magic(path) and not _exists(path):
            yield _missing(where, path)


class _Paths:
    """Collects what is wrong while it makes paths absolute."""

    def __init__(self, all_here: bool) -> None:
        self.problems: list[str] = []
        self._all_here = all_here

    def source(self, path: str, where: str) -> str:
        """Of data: a file, a directory, a glob, ``demo``, or a data set of the Hub."""
        if path == "demo":
            return path
        if not path:
            self.problems.append(f"{where} is empty. Name a file, a directory or a Hub id.")
            return path
        if path.startswith(HUB):
            if not _DATASET_ID.fullmatch(path[len(HUB) :]) and not _exists(path[len(HUB) :]):
                self.problems.append(
                    f"{where}={shown(path)}: a data set of the Hub is {HUB}owner/name."
                )
            return path
        full = absolute(path)
        if _exists(full):
            if self._all_here and (problem := _unreadable(Path(full))):
                self.problems.append(f"{where}={shown(path)}: {problem}.")
            return full
        if glob.has_magic(path):
            matches = list(itertools.islice(glob.iglob(full, recursive=True), _MOST_FILES))
            files = [file for file in map(Path, matches) if file.is_file()]
            wrong = next((file for file in files if name_problem(file)), None)
            if wrong is not None and self._all_here:
                self.problems.append(
                    f"{where}={shown(path)}: {shown(wrong.name)} matches it: {name_problem(wrong)}."
                )
            elif not files and self._must_exist(path) and len(matches) < _MOST_FILES:
                at = _seen_from(path)
                self.problems.append(f"{where}={shown(path)}: no file matches it{at}. Correct it.")
            return full
        is_id = _DATASET_ID.fullmatch(path) and not path.startswith((".", "~"))
        is_file = not name_problem(Path(path))
        if is_id and not is_file and not os.path.isdir(os.path.dirname(full)):
            return path
        if self._must_exist(path):
            hub = f" A data set of the Hub is {HUB}owner/name." if is_id else ""
            self.problems.append(_missing(where, path) + hub)
        return full

    def model(self, path: str, where: str) -> str:
        """Of a model or a tokenizer: a directory, ``demo``, or an id of the Hub."""
        if path == "demo" and where == "model.tokenizer":
            return path
        if path.startswith(HUB):
            # For a name whose first part is a directory here, too.
            if not _MODEL_ID.fullmatch(path[len(HUB) :]):
                self.problems.append(
                    f"{where}={shown(path)}: a model of the Hub is {HUB}owner/name."
                )
            return path[len(HUB) :]
        full = absolute(path)
        if os.path.isdir(full):
            return full
        if _exists(full):
            self.problems.append(
                f"{where}={shown(path)}: is a file. Give the directory that it is in."
            )
            return full
        is_id = _MODEL_ID.fullmatch(path) and not path.startswith((".", "~"))
        if is_id and ("/" not in path or not os.path.isdir(os.path.dirname(full))):
            return path
        if self._must_exist(path):
            hub = f" A model of the Hub is {HUB}{path}." if is_id else ""
            self.problems.append(_missing(where, path) + hub)
        return full

    def _must_exist(self, path: str) -> bool:
        return self._all_here or not os.path.isabs(os.path.expanduser(path))


def _unreadable(place: Path) -> str:
    """Why nothing can be read from a file or a directory that exists, by the names in it."""
    if not place.is_dir():
        return name_problem(place)
    if is_saved(place):
        return ""
    files = list(itertools.islice(files_in(place), _MOST_FILES))
    if not files:
        return f"no file in it ends in {', '.join(KNOWN)}. Give a directory with such files"
    return next((f"{shown(f.name)} in it: {why}" for f in files if (why := name_problem(f))), "")


def _missing(where: str, path: str) -> str:
    name, parent = os.path.basename(path.rstrip("/")), os.path.dirname(absolute(path))
    near = ""
    if os.path.isdir(parent) and len(name) < 100:
        # What may not be listed suggests nothing.
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            near = did_you_mean(name, [each.name for each in itertools.islice(entries, 10_000)])
    at = _seen_from(path)
    return f"{where}={shown(path)}: no such file or directory{at}.{near} Give an existing path."


def _seen_from(path: str) -> str:
    if os.path.isabs(os.path.expanduser(path)):
        return " on this machine"
    return f" in {Path.cwd()}, where relative paths start"


def _exists(path: str) -> bool:
    # os.path, since pathlib raises for names that are too long.
    return os.path.exists(path)
