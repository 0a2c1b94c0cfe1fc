"""Finds errors before a launch and in a plan that the ranks would find a minute after their start:
damaged files of the models, a Hub that cannot be reached, options of the task, wrong first rows of
a source.

This process does not load torch. Tasks of llmx need none to look at rows; one of the user's own is
asked in a process of its own (``ask``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from llmx.checkpoint.model_files import damaged_files
from llmx.compose.complete import Composed
from llmx.compose.task_rules import model_sources
from llmx.config import Experiment
from llmx.config.build import shown
from llmx.config.model_rules import added_tokens, whole_number
from llmx.config.tasks import shipped_tasks
from llmx.config.user_code import code_roots, user_code
from llmx.errors import ConfigError, DataError
from llmx.lifecycle.knowledge import tokenizer_rows
from llmx.offline import PROBE_TIMEOUT_S, why_no_answer
from llmx.run import snapshot
from llmx.run.provenance.content import hub_commit
from llmx.run.scratch import ask

PROGRAM = "llmx.tasks.first_rows"
TIME_LIMIT_S = 60.0
"""Without an answer by then, the ranks look themselves."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json",
    "vocab.txt",
)  # fmt: skip
"""A directory without one of them has no tokenizer."""


def check_inputs(composed: Composed) -> list[str]:
    """Check models and data; notes about what is lost of the first rows, and in a plan of what only
    lacks a network.

    Raises:
        ConfigError: a model or the task cannot be used.
        DataError: a source cannot be read, or one of its first rows is wrong.
    """
    exp = composed.experiment
    if problems := list(_model_problems(exp)):
        raise ConfigError("\n".join(problems))
    if problem := _vocabulary_problem(exp):
        raise ConfigError(problem)
    all_here = all(host.is_local for host in composed.plan.hosts)
    notes = [text.removeprefix("WARNING: ") for text in _check_first_rows(exp, all_here=all_here)]
    # A cache of the Hub on other hosts is not seen from here.
    unreached = list(_unreached(exp)) if all_here else []
    if unreached and not exp.dry_run:
        raise ConfigError("\n".join(unreached))
    return [*notes, *unreached]


def _models(exp: Experiment) -> dict[str, str]:
    """Key -> the model or tokenizer that it names, a directory or an id of the Hub."""
    options = {f"task.options.{name}": path for name, path in model_sources(exp.task).items()}
    places = {"model.path": exp.model.path, "model.tokenizer": exp.model.tokenizer, **options}
    return {key: path for key, path in places.items() if path and path != "demo"}


def _model_problems(exp: Experiment) -> Iterator[str]:
    """Yield a message for each problem of a model directory on this machine."""
    for key, path in _models(exp).items():
        directory = Path(path)
        if not directory.is_dir():
            continue
        weights = key.startswith("task.") or (
            key == "model.path" and exp.model.init == "pretrained"
        )
        for problem in damaged_files(directory, weights=weights):
            yield f"{key}={shown(path)}: {problem}"
        is_tokenizer = key == ("model.tokenizer" if exp.model.tokenizer else "model.path")
        if is_tokenizer and not any((directory / name).exists() for name in TOKENIZER_FILES):
            yield (
                f"{key}={shown(path)}: no tokenizer there (tokenizer.json). Copy it there, or set "
                "model.tokenizer to a directory or Hub id that has one."
            )


def _vocabulary_problem(exp: Experiment) -> str:
    """A message where a pretrained model has no row for ids of a tokenizer on this machine, added
    tokens apart; the ranks would say the same of others (``llmx.models.factory``)."""
    model = exp.model
    vocab_size = whole_number(model.network, "vocab_size")
    if model.init != "pretrained" or added_tokens(model) or vocab_size is None:
        return ""
    name = model.tokenizer or model.path or ""
    rows = tokenizer_rows(name, with_added=False)
    if rows is None or rows <= vocab_size:
        return ""
    return (
        f"model.tokenizer={shown(name)} has ids up to {rows - 1}, and model.path="
        f"{shown(model.path)} an embedding of {vocab_size} rows. Set model.tokenizer to the "
        "model's own tokenizer; model.add_tokens adds tokens to it."
    )


def _unreached(exp: Experiment) -> Iterator[str]:
    """Models of the Hub that are not in its cache here, where the Hub does not answer."""
    missing = {}
    for key, name in _models(exp).items():
        revision = exp.model.revision if key.startswith("model.") else None
        if not Path(name).is_absolute() and not hub_commit(name, kind="models", revision=revision):
            missing[key] = name
    if not missing:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    why = "HF_HUB_OFFLINE is set"
    if not os.environ.get("HF_HUB_OFFLINE"):
        why = why_no_answer(endpoint, timeout_s=PROBE_TIMEOUT_S)
    for key, name in missing.items() if why else ():
        yield (
            f"{key}={name}: no such directory and not in the Hub's cache on this machine, and "
            f"{endpoint} cannot be reached ({why}). Download it where there is a network (hf "
            f"download {name} --local-dir DIR) and set {key}=DIR."
        )


def _check_first_rows(exp: Experiment, *, all_here: bool = True) -> list[str]:
    """Check the task and the first rows of each source; warnings of what is lost of these rows.
    ``all_here``: the ranks run on this machine, and have what it has."""
    if exp.task.kind in shipped_tasks():
        try:
            # By name: this process does not depend on what the ranks import.
            module = importlib.import_module(PROGRAM)
        except ImportError:  # a launching machine without what the ranks have
            return []
        if not module.check_first_rows(exp)[1]:
            return []
    if exp.model.trust_remote_code:  # code of the Hub, which only the ranks run
        return []
    # Other hosts may have packages that this machine has not.
    roots = [str(code.root) for code in user_code(exp.task)] if all_here else code_roots(exp.task)
    answer = ask(PROGRAM, snapshot.dump_config(exp), timeout_s=TIME_LIMIT_S, python_path=roots)
    if answer is None:
        return []
    if problem := answer["problem"]:
        raise (ConfigError if answer["is_config"] else DataError)(problem)
    if all_here and answer["code_problem"]:
        raise ConfigError(answer["code_problem"])
    warnings: list[str] = answer["warnings"]
    return warnings
